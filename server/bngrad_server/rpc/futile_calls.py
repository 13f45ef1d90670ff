"""Counts the calls that clients cancel, to refuse at little cost those of a client that cancels hundreds at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_MOST = 256.0
_HALF_LIFE_S = 2.0
_MAX_CLIENTS = 512
_LATENCY_S = 0.02
"""By how much the clock of a client's deadline may be ahead."""


def is_before(deadline: float | None) -> bool:
    """Whether a call that is cancelled now is so by its client's choice, and not because its deadline has passed."""
    return deadline is None or time.monotonic() < deadline - _LATENCY_S


class FutileCalls:
    """How many of its latest calls each client has cancelled, those that were answered taken off; for any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, tuple[float, float]] = {}  # and since when
        self._mutex = threading.Lock()

    def cancelled(self, client: str) -> None:
        """Counts a call that a client has cancelled."""
        with self._mutex:
            count = self._count(client) + 1.0
            self._counts.pop(client, None)
            self._counts[client] = count, self._clock()
            if len(self._counts) > _MAX_CLIENTS:
                del self._counts[next(iter(self._counts))]

    def answered(self, client: str) -> None:
        """Makes up for one that was cancelled."""
        if client in self._counts:
            with self._mutex:
                count = self._count(client) - 1.0
                if count > 0:
                    self._counts[client] = count, self._clock()
                else:
                    self._counts.pop(client, None)

    def are_too_many(self, client: str) -> bool:
        """Whether the next calls of a client are to be refused."""
        return client in self._counts and self._count(client) > _MOST

    def _count(self, client: str) -> float:
        count, since = self._counts.get(client, (0.0, 0.0))
        return float(count * 0.5 ** ((self._clock() - since) / _HALF_LIFE_S))
