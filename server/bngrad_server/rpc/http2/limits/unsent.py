"""How long clients may take nothing of what there is for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Unsent(Generic[Owner]):
    """Those that have something unsent: connections, or calls; for the event loop's thread."""

    def __init__(self, moved_of: Callable[[Owner], int], timeout_s: float) -> None:
        """Has none yet; ``moved_of`` tells how many bytes one has sent, or received, so far."""
        self._moved_of = moved_of
        self._timeout_s = timeout_s
        self._all: dict[Owner, tuple[int, float]] = {}  # how much has moved, and since when it is as much

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._all

    def add(self, owner: Owner) -> None:
        """Adds one that has something unsent, unless it is there."""
        if owner not in self._all:
            self._all[owner] = self._moved_of(owner), time.monotonic()

    def discard(self, owner: Owner) -> None:
        """Forgets one that has nothing unsent, or has ended."""
        self._all.pop(owner, None)

    def overdue(self) -> Iterator[Owner]:
        """Yields those whose clients have taken nothing for too long."""
        now = time.monotonic()
        for owner, (moved, since) in list(self._all.items()):
            if (moves := self._moved_of(owner)) != moved:
                self._all[owner] = moves, now
            elif now - since > self._timeout_s:
                yield owner
