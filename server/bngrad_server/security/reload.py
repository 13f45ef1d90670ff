"""Files that are read again when they change, without a restart."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

_CHECK_S = 0.5
"""How often the files are looked at."""
_EMPTY_S = 2.0
"""For how long an empty file counts as half written: `command > file` empties it long before the command writes."""


class _Identity(NamedTuple):
    """What a change of a file changes."""

    inode: int
    mode: int
    modified_ns: int
    nbytes: int


class ReloadedFiles(Generic[Content]):
    """The content of some files, at most half a second old, or two seconds if a file is now empty.

    A change that cannot be read is logged, and the old content stays: the files may be half written at that moment. If
    the system refused to read, it is tried again at each check: a new owner or a free descriptor changes no file.
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
        self._empty_since = math.inf
        self._refusal = ""
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
        now = time.monotonic()
        self._next_check = now + _CHECK_S
        state = self._identities()
        if state == self._state:
            return
        is_empty = any(each is not None and each.nbytes == 0 for each in state)
        self._empty_since = min(self._empty_since, now) if is_empty else math.inf
        if is_empty and now - self._empty_since < _EMPTY_S:
            return
        names = ", ".join(map(str, self._paths))
        try:
            self._content = self._read()
        except OSError as error:
            refusal = f"{state}: {error}"
            if refusal != self._refusal:
                self._log_failure(names, error)
            self._refusal = refusal
        except Exception as error:
            self._state, self._refusal = state, ""
            self._log_failure(names, error)
        else:
            self._state, self._refusal = state, ""
            logger.info("%s changed and was read again", names)

    def _log_failure(self, names: str, error: Exception) -> None:
        logger.error("%s changed and cannot be used, so the old content stays in use: %s", names, error)

    def _identities(self) -> list[_Identity | None]:
        return [_identity(path) for path in self._paths]


def _identity(path: Path) -> _Identity | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _Identity(status.st_ino, status.st_mode, status.st_mtime_ns, status.st_size)
