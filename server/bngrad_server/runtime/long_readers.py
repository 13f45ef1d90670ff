"""The descriptors of an event loop whose callbacks take long, so that it runs one of these callbacks at a time."""

from __future__ import annotations

import contextlib
import select
from collections import Counter

_MAX_EVENTS = 2048


class LongReaders:
    """Descriptors, each of an owner. Of those that are ready, owners take turns, and so do the descriptors of each."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._owners: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._turns = 0
        self._last_of_owner: dict[str, int] = {}
        self._last: dict[int, int] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._owners

    def fileno(self) -> int:
        """Returns the descriptor that is readable while one of these is ready."""
        return self._epoll.fileno()

    def close(self) -> None:
        """Closes the descriptor of `fileno`."""
        self._epoll.close()

    def add(self, fd: int, owner: str) -> None:
        """Adds a descriptor."""
        self._epoll.register(fd, select.EPOLLIN)
        self._owners[fd] = owner
        self._counts[owner] += 1
        self._last[fd] = 0
        self._last_of_owner.setdefault(owner, 0)

    def remove(self, fd: int) -> None:
        """Undoes `add`."""
        with contextlib.suppress(OSError):  # it was closed
            self._epoll.unregister(fd)
        owner = self._owners.pop(fd)
        self._counts[owner] -= 1
        del self._last[fd]
        if not self._counts[owner]:
            del self._counts[owner], self._last_of_owner[owner]

    def next(self) -> int | None:
        """Returns the ready descriptor whose turn it is; None if none is ready."""
        ready = [fd for fd, _ in self._epoll.poll(0, _MAX_EVENTS)]
        if not ready:
            return None
        chosen = min(ready, key=lambda fd: (self._last_of_owner[self._owners[fd]], self._last[fd]))
        self._turns += 1
        self._last[chosen] = self._last_of_owner[self._owners[chosen]] = self._turns
        return chosen

    def count_ready(self) -> int:
        """Returns how many are ready; any thread may call this."""
        return len(self._epoll.poll(0, _MAX_EVENTS))
