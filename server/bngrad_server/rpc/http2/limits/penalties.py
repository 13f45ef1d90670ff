"""Remembers whose connections were ended for a breach: the next ones of such a peer have to wait."""

from __future__ import annotations

import functools
import ipaddress
import time
from collections.abc import Callable

_FREE_SCORE = 16.0
"""Below this nothing waits: clients crash, load balancers probe, and tokens are replaced."""
_DOUBLING_SCORE = 16.0
_MAX_SCORE = 96.0
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 1.0
_HALF_LIFE_S = 2.0
_MAX_PEERS = 512


class Penalties:
    """The scores of peers, which fade within seconds. A peer is what `peer_of` returns, or an authenticated client."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._scores: dict[str, tuple[float, float]] = {}  # and since when; the latest comes last

    def add(self, peer: str, score: float) -> None:
        """Counts a breach."""
        total = min(self._score(peer) + score, _MAX_SCORE)
        self._scores.pop(peer, None)
        self._scores[peer] = total, self._clock()
        if len(self._scores) > _MAX_PEERS:
            del self._scores[next(iter(self._scores))]

    def delay_s(self, peer: str) -> float:
        """Returns how long the next connection of a peer has to wait."""
        score = self._score(peer)
        if score < _FREE_SCORE:
            return 0.0
        return float(min(_FIRST_DELAY_S * 2 ** ((score - _FREE_SCORE) / _DOUBLING_SCORE), _MAX_DELAY_S))

    def _score(self, peer: str) -> float:
        score, since = self._scores.get(peer, (0.0, 0.0))
        return float(score * 0.5 ** ((self._clock() - since) / _HALF_LIFE_S)) if score else 0.0


@functools.lru_cache(maxsize=256)
def peer_of(client: str) -> str:
    """Returns whom a connection's breaches are counted for: its address, in IPv6 its network of 64 bits."""
    if ":" not in client:
        return client
    try:
        address = ipaddress.IPv6Address(client.partition("%")[0])
    except ValueError:
        return client
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))
