"""Removes what a server leaves in the file system when it dies without a word.

Run as ``python -m bngrad_server.janitor PATH...``, with a pipe to the front process as standard input. It waits for the
end of that process, and removes the paths that are still what they were when it was started.
"""

from __future__ import annotations

import os
import shutil
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
            [sys.executable, "-I", "-S", __file__, *(f"{path.stat().st_ino}:{path}" for path in paths)],
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
        inode, _, path = argument.partition(":")
        try:
            if os.stat(path).st_ino != int(inode):
                continue  # another server's by now
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        except OSError:
            continue


if __name__ == "__main__":
    main()
