"""Remembers whose connections were ended for a breach: the next ones of such a peer have to wait."""

from __future__ import annotations

import functools
import ipaddress
import threading
import time
from collections.abc import Callable

from bngrad_server.rpc.http2.limits.futile_calls import FadingCounts

_FREE_SCORE = 16.0
"""Below this nothing waits: clients crash, load balancers probe, and tokens are replaced."""
_DOUBLING_SCORE = 16.0
_MAX_SCORE = 96.0
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 1.0
_HALF_LIFE_S = 2.0


class Penalties:
    """The scores of peers, which fade within seconds; for any thread.

    A peer is what `peer_of` returns, or an authenticated client.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._scores = FadingCounts(_HALF_LIFE_S, clock, _MAX_SCORE)
        self._mutex = threading.Lock()

    def add(self, peer: str, score: float) -> None:
        """Counts a breach."""
        with self._mutex:
            self._scores.add(peer, score)

    def delay_s(self, peer: str) -> float:
        """Returns how long the next connection of a peer has to wait."""
        score = self._scores.of(peer)
        if score < _FREE_SCORE:
            return 0.0
        return float(min(_FIRST_DELAY_S * 2 ** ((score - _FREE_SCORE) / _DOUBLING_SCORE), _MAX_DELAY_S))


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
