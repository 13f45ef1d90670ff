"""Removes the sockets and directories that a server leaves behind when it is killed.

It runs as a process of its own, with a pipe from the front process as standard input. When the pipe closes, it removes
those of the given paths that have not been replaced since its start.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class Janitor:
    """The process that cleans up after this one has ended."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            # Without site-packages, to stay small: the process runs as long as the server.
            [sys.executable, "-I", "-S", __file__, *(f"{_identity(path)}:{path}" for path in paths)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C of a terminal must reach only the front process
        )

    def close(self) -> None:
        """Makes it remove the paths, and waits for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Waits for the end of the pipe, and removes the paths."""
    sys.stdin.buffer.read()
    for argument in sys.argv[1:]:
        identity, _, path = argument.partition(":")
        try:
            if _identity(path) != identity:
                continue  # it belongs to another server by now
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        except OSError:
            continue


def _identity(path: str | Path) -> str:
    """Returns what tells a socket from a later one at its path, which may get the same inode number."""
    status = os.stat(path)
    changed_ns = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
    return f"{status.st_ino}-{changed_ns}"


if __name__ == "__main__":
    main()
