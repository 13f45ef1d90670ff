"""How long the next connections of a peer wait after breaches."""

from __future__ import annotations

import pytest
from tests.clock import Clock

from bngrad_server.rpc.http2.limits.penalties import Penalties, peer_of


def test_a_few_failures_are_free_and_many_delay_up_to_a_second() -> None:
    penalties = Penalties(Clock())
    delays = []
    for _ in range(200):
        delays.append(penalties.delay_s("bad"))
        penalties.add("bad", 1.0)
    assert delays[:16] == [0.0] * 16
    assert delays == sorted(delays)
    assert 0.1 <= delays[16] < 0.2
    assert delays[-1] == 1.0
    assert penalties.delay_s("good") == 0.0


def test_breaches_are_forgotten_within_seconds() -> None:
    clock = Clock()
    penalties = Penalties(clock)
    penalties.add("bad", 1000.0)
    clock.now += 6
    assert penalties.delay_s("bad") == 0.0


def test_only_the_latest_peers_are_remembered() -> None:
    penalties = Penalties(Clock())
    for number in range(10_000):
        penalties.add(f"10.0.{number // 256}.{number % 256}", 50.0)
    assert len(penalties._scores) <= 512
    assert penalties.delay_s("10.0.39.15") > 0


@pytest.mark.parametrize(
    ("client", "peer"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("process 12", "process 12"),
        ("token alice", "token alice"),
        ("certificate a:b", "certificate a:b"),
    ],
)
def test_a_network_of_ipv6_is_one_peer(client: str, peer: str) -> None:
    assert peer_of(client) == peer
