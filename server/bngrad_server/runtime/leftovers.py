"""Removes the sockets and directories of a server that was killed: the program of the janitor process.

Its standard input is a pipe from the front process. When the pipe closes, it removes those of the given paths that have
not been replaced since the server's start. It imports no package, to stay small: it runs as long as the server.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path


def describe(path: Path) -> str:
    """Returns what tells `remove` a path, and what lies there now."""
    return f"{_identity(path)}:{path}"


def remove(described: Sequence[str]) -> None:
    """Removes what `describe` has described, unless something else lies there by now."""
    for each in described:
        identity, _, path = each.partition(":")
        try:
            if _identity(path) != identity:
                continue  # it belongs to another server
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        except OSError:
            continue


def main() -> None:
    """Waits for the end of the pipe, and removes the paths."""
    # A whole group of processes may get stop signals; the front process decides when this one ends.
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove(sys.argv[1:])


def _identity(path: str | Path) -> str:
    """Returns what tells a socket from a later one at its path, which may get the same inode number."""
    status = os.stat(path)
    changed_ns = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
    return f"{status.st_ino}-{changed_ns}"


if __name__ == "__main__":
    main()
