"""Runs the command line as a child process whose stdin is a pipe from its parent, and stops it once that has gone."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys

from bngrad_cli.__main__ import main


def _stop_with_parent() -> None:
    """Has the system send SIGTERM when the pipe's other end is closed: a thread that waits would have a heap."""
    pipe = sys.stdin.fileno()
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, 0)
    if poll.poll(0):  # the parent has gone already
        sys.exit()


if __name__ == "__main__":
    _stop_with_parent()
    main()
