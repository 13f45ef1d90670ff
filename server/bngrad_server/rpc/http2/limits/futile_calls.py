"""Counts the calls that clients cancel, to refuse at little cost those of a client that cancels hundreds at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

_MOST = 256.0
_HALF_LIFE_S = 2.0
_STRIKE_HALF_LIFE_S = 8.0
_MAX_COUNTED = 512
_LATENCY_S = 0.02
"""By how much the clock of a client's deadline may be ahead."""


def is_before(deadline: float | None) -> bool:
    """Whether a call that is cancelled now is so by its client's choice, and not because its deadline has passed."""
    return deadline is None or time.monotonic() < deadline - _LATENCY_S


class FutileCalls:
    """How many of its latest calls each client has cancelled, those that were answered taken off; for any thread.

    A client that has cancelled too many may cancel half as many the next time, until that is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._cancelled = FadingCounts(_HALF_LIFE_S, clock)
        self._strikes = FadingCounts(_STRIKE_HALF_LIFE_S, clock)
        self._mutex = threading.Lock()

    def cancelled(self, client: str) -> None:
        """Counts a call that a client has cancelled."""
        with self._mutex:
            were_too_many = self.are_too_many(client)
            self._cancelled.add(client, 1)
            if not were_too_many and self.are_too_many(client):
                self._strikes.add(client, 1)

    def answered(self, client: str) -> None:
        """Makes up for one that was cancelled."""
        if client in self._cancelled:
            with self._mutex:
                self._cancelled.add(client, -1)

    def are_too_many(self, client: str) -> bool:
        """Whether the next calls of a client are to be refused."""
        return client in self._cancelled and self._cancelled.of(client) > _MOST * 0.5 ** self._strikes.of(client)


class FadingCounts:
    """Counts by client, which halve in ``half_life_s``; only the clients that were counted last are kept."""

    def __init__(self, half_life_s: float, clock: Callable[[], float], most: float = math.inf) -> None:
        """Counts nothing yet; no count grows beyond ``most``."""
        self._half_life_s = half_life_s
        self._clock = clock
        self._most = most
        self._counts: dict[str, tuple[float, float]] = {}  # and since when

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, client: str) -> bool:
        return client in self._counts

    def of(self, client: str) -> float:
        """Returns what is left of a client's count."""
        count, since = self._counts.get(client, (0.0, 0.0))
        return float(count * 0.5 ** ((self._clock() - since) / self._half_life_s))

    def add(self, client: str, change: float) -> None:
        """Changes a client's count; it is forgotten once nothing is left."""
        count = min(self.of(client) + change, self._most)
        self._counts.pop(client, None)
        if count > 0:
            self._counts[client] = count, self._clock()
            if len(self._counts) > _MAX_COUNTED:
                del self._counts[next(iter(self._counts))]
