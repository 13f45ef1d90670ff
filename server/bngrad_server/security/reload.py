"""Files that are read again when they change, without a restart."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

_CHECK_S = 0.5
"""How often the files are looked at."""


class ReloadedFiles(Generic[Content]):
    """The content of some files, at most half a second old.

    A change that cannot be read is logged, and the old content stays: the files may be half written at that moment.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Content]) -> None:
        """Reads the files.

        Args:
            paths: Their paths; a symbolic link that points elsewhere has changed.
            read: Reads them; raises OSError or ValueError for files that cannot be used.

        Raises:
            OSError: From ``read``.
            ValueError: From ``read``.
        """
        self._paths = paths
        self._read = read
        self._mutex = threading.Lock()
        self._state = self._identities()
        self._content = read()
        self._next_check = time.monotonic() + _CHECK_S

    @property
    def content(self) -> Content:
        """The content."""
        if time.monotonic() >= self._next_check and self._mutex.acquire(blocking=False):
            try:
                self._reload()
            finally:
                self._mutex.release()
        return self._content

    def _reload(self) -> None:
        self._next_check = time.monotonic() + _CHECK_S
        state = self._identities()
        if state == self._state:
            return
        self._state = state
        names = ", ".join(map(str, self._paths))
        try:
            self._content = self._read()
        except Exception as error:
            logger.error("%s changed and cannot be used, so the old content stays in use: %s", names, error)
        else:
            logger.info("%s changed and was read again", names)

    def _identities(self) -> list[tuple[int, ...] | None]:
        return [_identity(path) for path in self._paths]


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mode, status.st_mtime_ns, status.st_size
