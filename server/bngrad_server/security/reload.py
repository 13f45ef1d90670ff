"""Files that are read again when they have changed, without a restart."""

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

_LOOK_S = 0.5
"""How long a look at the files is good for."""


class ReloadedFiles(Generic[Content]):
    """What some files say, as of a moment ago.

    A change that cannot be read is logged and leaves everything as it was: files may be half written just then.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Content]) -> None:
        """Reads the files.

        Args:
            paths: Their paths; a symbolic link that points elsewhere has changed.
            read: Reads them; raises OSError or ValueError where that is no use.

        Raises:
            OSError: From ``read``.
            ValueError: Alike.
        """
        self._paths = paths
        self._read = read
        self._mutex = threading.Lock()
        self._state = self._look()
        self._content = read()
        self._look_at = time.monotonic() + _LOOK_S

    @property
    def content(self) -> Content:
        """What the files say."""
        if time.monotonic() >= self._look_at and self._mutex.acquire(blocking=False):
            try:
                self._reload()
            finally:
                self._mutex.release()
        return self._content

    def _reload(self) -> None:
        self._look_at = time.monotonic() + _LOOK_S
        state = self._look()
        if state == self._state:
            return
        self._state = state
        names = ", ".join(map(str, self._paths))
        try:
            self._content = self._read()
        except (OSError, ValueError) as error:
            logger.error("%s changed and cannot be used, so what was there before still holds: %s", names, error)
        else:
            logger.info("%s changed and was read again", names)

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_identity(path) for path in self._paths]


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
