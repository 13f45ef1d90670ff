"""Removes what a server leaves in the file system when it dies without a word.

Run as ``python -m bngrad_server.runtime.janitor PATH...``, with a pipe to the front process as standard input. It
waits for the end of that process, and removes the paths that are still what they were when it was started.
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
    """The process that waits for the end of this one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Starts it, to remove these paths."""
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            # Without site-packages: it is there all the time, and small.
            [sys.executable, "-I", "-S", __file__, *(f"{_identity(path)}:{path}" for path in paths)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the front process
        )

    def close(self) -> None:
        """Has it remove the paths that are still there, and waits for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Waits, and removes."""
    sys.stdin.buffer.read()
    for argument in sys.argv[1:]:
        identity, _, path = argument.partition(":")
        try:
            if _identity(path) != identity:
                continue  # another server's by now
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        except OSError:
            continue


def _identity(path: str | Path) -> str:
    """Tells a socket from others that were made at its path later, of which one may have its inode's number."""
    status = os.stat(path)
    changed_ns = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
    return f"{status.st_ino}-{changed_ns}"


if __name__ == "__main__":
    main()
