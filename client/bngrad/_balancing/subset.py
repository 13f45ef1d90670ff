"""The servers that a client uses of a large fleet: a random part of it that stays the same."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence

from bngrad._balancing.resolver import Address
from bngrad._balancing.upstream import Upstream

SUBSET_SIZE = 16
_MAX_TRIED = 4
"""How many times its size a subset may have, when servers of it have failed and others take their place."""
_REDRAW_S = 5.0
"""How soon another subset is drawn when every server of this one has failed."""


class Subset:
    """Draws a part of a fleet by rendezvous hashing: gRFC A68, "Random Subsetting".

    The addresses are ranked by a hash of themselves and of a random seed of the client. So clients spread evenly, and a
    change of the fleet moves few of them.

    Attributes:
        size: How many servers are used, of those that have not failed.
    """

    def __init__(self) -> None:
        self.size = SUBSET_SIZE
        self._addresses: list[Address] = []
        self._ranked: list[Address] = []
        self._draw()

    @property
    def is_all(self) -> bool:
        """Whether every server of the fleet is used."""
        return len(self._addresses) <= self.size

    def set(self, addresses: Sequence[Address]) -> None:
        """Takes the addresses of the whole fleet."""
        if list(addresses) != self._addresses:
            self._addresses = list(addresses)
            self._rank()

    def members(self, servers: Mapping[Address, Upstream]) -> list[Address]:
        """Returns the addresses to use, in the order of the fleet's.

        They are the first in rank. Instead of each that has failed there is one more, until it is up again. If many
        have failed and all that were tried, another part of the fleet is drawn.

        Args:
            servers: What is known of the servers used so far.
        """
        if self.is_all:
            return self._addresses
        if len(servers) >= _MAX_TRIED * self.size and all(server.has_failed for server in servers.values()):
            now = time.monotonic()
            if now >= self._drawn_at + _REDRAW_S:
                self._draw()
                self._rank()
        chosen: set[Address] = set()
        hopeful = up = 0
        for address in self._ranked:
            if up >= self.size or len(chosen) >= _MAX_TRIED * self.size:
                break
            server = servers.get(address)
            if hopeful < self.size or (server is not None and server.is_up):
                chosen.add(address)
                hopeful += server is None or not server.has_failed
                up += server is not None and server.is_up
        return [address for address in self._addresses if address in chosen]

    def _draw(self) -> None:
        self._seed = os.urandom(16)
        self._drawn_at = time.monotonic()

    def _rank(self) -> None:
        self._ranked = sorted(self._addresses, key=self._hash)

    def _hash(self, address: Address) -> bytes:
        return hashlib.blake2b(address.target.encode(), digest_size=8, key=self._seed).digest()
