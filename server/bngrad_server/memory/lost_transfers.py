"""Remembers which clients lost transfers for others' sake, and how much memory they may have for some time.

Otherwise a client that announces requests and does not send them would take all memory again at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

_SHORTEST_S, _LONGEST_S = 10.0, 60.0
"""How long a client is limited after its first loss; twice as long after each further one."""
_MEMORY_S = 60.0
"""How long its losses count thereafter."""
_MAX_CLIENTS = 1024
_MOST_LOSSES = 16
_SMALLEST_FRACTION = 64
"""A client may always have one part in this many of the memory."""


@dataclass(slots=True)
class _Losses:
    """A client's losses, and until when they limit it, on the monotonic clock."""

    count: int
    until: float


class LostTransfers:
    """The clients that lost transfers lately. Its user locks it; while it is false, no client is limited."""

    def __init__(self, nbytes: int) -> None:
        """Limits clients in memory of ``nbytes``."""
        self._nbytes = nbytes
        self._least_nbytes = nbytes // _SMALLEST_FRACTION
        self._losses: dict[str, _Losses] = {}  # the latest last

    def __bool__(self) -> bool:
        return bool(self._losses)

    def add(self, client: str) -> None:
        """Remembers a loss, and forgets old ones."""
        now = time.monotonic()
        before = self._losses.pop(client, None)
        count = 1 if before is None or before.until + _MEMORY_S <= now else min(before.count + 1, _MOST_LOSSES)
        self._forget_old()
        if len(self._losses) >= _MAX_CLIENTS:
            del self._losses[next(iter(self._losses))]
        self._losses[client] = _Losses(count, now + min(_SHORTEST_S * 2 ** (count - 1), _LONGEST_S))

    def _forget_old(self) -> None:
        """Forgets the losses that count no longer."""
        now = time.monotonic()
        self._losses = {client: losses for client, losses in self._losses.items() if losses.until + _MEMORY_S > now}

    def rest_s(self, client: str) -> float:
        """For how long the client is still limited."""
        losses = self._losses.get(client)
        return 0.0 if losses is None else max(losses.until - time.monotonic(), 0.0)

    def limit(self, client: str, holders: Iterable[str]) -> float:
        """The bytes that the client may have while others hold memory; infinite if it is not limited.

        The memory is divided evenly among these clients and one that may come; each further loss halves the share.
        """
        if not self.rest_s(client):
            return math.inf
        return max(self._even_share(holders) >> self._losses[client].count - 1, self._least_nbytes)

    def keep(self, client: str, holders: Iterable[str]) -> float:
        """The bytes beyond which a client's slow transfers make room for those that wait; less than `limit`."""
        if not self.rest_s(client):
            return math.inf
        return self._even_share(holders) >> self._losses[client].count

    def _even_share(self, holders: Iterable[str]) -> int:
        limited = {client for client in self._losses if self.rest_s(client)}
        return self._nbytes // (len(limited.union(holders)) + 1)
