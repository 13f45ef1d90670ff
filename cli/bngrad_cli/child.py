"""Runs the command line as a child process, and stops it once its parent has gone: then its stdin, a pipe, ends."""

from __future__ import annotations

import os
import signal
import sys
import threading

from bngrad_cli.__main__ import main


def _stop_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_parent, name="await-parent", daemon=True).start()
    main()
