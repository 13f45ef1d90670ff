"""Reads the files that decide who may call, and checks that no other user of the host may change them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def _open_at_once(path: str, flags: int) -> int:
    """Opens also a pipe, for whose other end `open` would wait."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_guarded(path: Path, *, private: bool) -> bytes:
    """Reads a file, at the end of symbolic links; Kubernetes mounts secrets as such.

    Args:
        path: Its path.
        private: Whether to warn if every user of the host may read it.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no regular file, or every user of the host may write to it.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        found_mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(found_mode):
            raise ValueError(f"{path} is no regular file")
        mode = stat.S_IMODE(found_mode)
        found = f"{path} has mode {mode:04o}, so every user of this host may"
        expected = f"it should have mode 0600 or 0640: chmod o-rw {path}"
        if mode & stat.S_IWOTH:
            raise ValueError(f"{found} change it, and with it who may call; {expected}")
        if private and mode & stat.S_IROTH:
            logger.warning("%s read it; %s", found, expected)
        return file.read()
