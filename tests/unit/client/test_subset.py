"""The part of a large fleet that a client uses."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bngrad._balancing import subset
from bngrad._balancing.resolver import Address
from bngrad._balancing.subset import SUBSET_SIZE, Subset
from bngrad._balancing.upstream import Upstream


def fleet(size: int) -> list[Address]:
    return [Address(f"10.0.{number // 256}.{number % 256}:50051") for number in range(size)]


class Client:
    """What a load balancer does with its subset: it uses the members, and a server added later is probed first."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.subset = Subset()
        self.subset.set(addresses)
        self.servers: dict[Address, Upstream] = {}
        self.choose(is_up=True)

    def choose(self, *, is_up: bool = False) -> None:
        self.servers = {
            address: self.servers.get(address) or Upstream(cast(Any, None), is_up=is_up)
            for address in self.subset.members(self.servers)
        }

    def mark(self, address: Address, *, is_up: bool) -> None:
        self.servers[address].is_up, self.servers[address].has_failed = is_up, not is_up
        self.choose()

    @property
    def up(self) -> set[Address]:
        return {address for address, server in self.servers.items() if server.is_up}

    @property
    def unknown(self) -> set[Address]:
        """The servers that are being probed for the first time."""
        return {address for address, server in self.servers.items() if not server.is_up and not server.has_failed}


def test_a_small_fleet_is_used_as_a_whole() -> None:
    addresses = fleet(SUBSET_SIZE)
    assert list(Client(addresses).servers) == addresses


def test_clients_of_a_large_fleet_spread_evenly() -> None:
    addresses, clients = fleet(100), 1000
    counts = Counter(address for _ in range(clients) for address in Client(addresses).servers)
    mean = clients * SUBSET_SIZE / len(addresses)
    assert sum(counts.values()) == clients * SUBSET_SIZE
    assert statistics.pstdev(counts[address] for address in addresses) < 1.5 * mean**0.5  # a Poisson process has 1


def test_members_come_in_the_order_of_the_fleet() -> None:
    addresses = fleet(100)
    members = list(Client(addresses).servers)
    assert members == sorted(members, key=addresses.index)


def test_a_change_of_the_fleet_moves_few() -> None:
    addresses = fleet(100)
    client = Client(addresses)
    before = client.up
    gone = next(iter(before))
    client.subset.set([address for address in addresses if address != gone])
    client.choose()
    assert client.up == before - {gone}
    assert len(client.unknown) == 1
    client = Client(addresses)
    before = client.up
    client.subset.set(fleet(110))
    client.choose()
    assert len(set(client.servers) - before) < 10
    assert client.up == before  # until the new ones are known to answer
    for address in client.unknown:
        client.mark(address, is_up=True)
    assert len(client.servers) == SUBSET_SIZE


def test_a_server_that_failed_is_replaced_until_it_is_up_again() -> None:
    client = Client(fleet(100))
    before = client.up
    failed = sorted(before)[:3]
    for address in failed:
        client.mark(address, is_up=False)
    spares = client.unknown
    assert len(spares) == 3
    for address in spares:
        client.mark(address, is_up=True)
    assert client.up == before - {*failed} | spares
    for address in failed:
        client.mark(address, is_up=True)
    assert set(client.servers) == client.up == before


def test_a_spare_that_fails_too_is_replaced() -> None:
    client = Client(fleet(100))
    client.mark(next(iter(client.servers)), is_up=False)
    (spare,) = client.unknown
    client.mark(spare, is_up=False)
    (another,) = client.unknown
    assert another != spare


def test_another_part_is_drawn_if_all_have_failed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(subset, "time", SimpleNamespace(monotonic=lambda: now))
    client = Client(fleet(1000))
    while left := client.up | client.unknown:
        client.mark(left.pop(), is_up=False)
    tried = set(client.servers)
    assert len(tried) == 4 * SUBSET_SIZE
    client.choose()
    assert set(client.servers) == tried
    now += 10
    client.choose()
    assert len(client.unknown) >= SUBSET_SIZE
    assert len(set(client.servers) & tried) < SUBSET_SIZE
    while left := client.unknown:
        client.mark(left.pop(), is_up=False)
    tried = set(client.servers)
    client.choose()
    assert set(client.servers) == tried  # until a while has passed again


@pytest.mark.parametrize(("size", "up"), [(1000, 1), (40, 0)])
def test_no_other_part_is_drawn_while_a_server_is_up_or_none_is_left(
    size: int, up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(subset, "time", SimpleNamespace(monotonic=lambda: now))
    client = Client(fleet(size))
    first = client.up
    kept = set(list(first)[:up])
    while left := (client.up | client.unknown) - kept:
        client.mark(left.pop(), is_up=False)
    now += 10
    client.choose()
    assert client.up == kept
    while down := client.servers.keys() - client.up:
        client.mark(down.pop(), is_up=True)
    assert client.up == first
