"""What counts as wasted time, and when paused connections are resumed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.clock import Clock

from bngrad_server.rpc.http2.limits import waste
from bngrad_server.rpc.http2.limits.waste import Paused, Waste
from bngrad_wire.http2 import ServerConnection

TOO_LONG_S = 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waste, "time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    return clock


@pytest.fixture
def http() -> Iterator[ServerConnection]:
    near, far = socket.socketpair()
    with far:
        connection = ServerConnection(near)
        yield connection
        connection.close()


def wastes(waste: Waste, clock: Clock) -> bool:
    """Takes too long for nothing, and returns whether the connection is to be paused."""
    began = clock()
    clock.now += TOO_LONG_S
    return waste.count(began)


def test_a_connection_may_waste_little_time_between_good_calls(http: ServerConnection, clock: Clock) -> None:
    counted = Waste(http)
    began = clock()
    clock.now += 0.0005
    assert not counted.count(began)
    assert wastes(counted, clock)
    assert counted.last_s == TOO_LONG_S
    counted.reset(clock())
    assert counted.total_s == 0.0
    http.frame_budget -= 1
    began = clock()
    clock.now += 0.0005
    assert not counted.count(began)


def test_what_remains_of_an_upload_is_no_waste_up_to_a_size(
    http: ServerConnection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waste, "_DISCARDABLE_NBYTES", 10_000)
    counted = Waste(http)
    http.frame_budget -= 1  # for the good call
    counted.reset(clock())
    http.io.moved += 9_000
    assert not wastes(counted, clock)
    http.io.moved += 1_000
    assert not wastes(counted, clock)
    assert wastes(counted, clock)


def test_reads_of_nothing_use_up_what_may_be_discarded(
    http: ServerConnection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waste, "_DISCARDABLE_NBYTES", 4096)
    counted = Waste(http)
    counted.reset(clock())
    assert [wastes(counted, clock) for _ in range(5)] == [False] * 4 + [True]


def test_frames_that_earn_nothing_are_waste_also_after_a_good_call(http: ServerConnection, clock: Clock) -> None:
    counted = Waste(http)
    counted.reset(clock())
    http.frame_budget -= 1
    assert wastes(counted, clock)


class Member:
    def __init__(self, http: ServerConnection) -> None:
        self.waste = Waste(http)
        self.waste.last_s = 0.01


def test_paused_connections_share_a_tenth_of_the_time_and_save_none_up(http: ServerConnection, clock: Clock) -> None:
    paused = Paused[Member]()
    clock.now += 100
    assert list(paused.resume()) == []
    members = [Member(http) for _ in range(4)]
    for member in members:
        paused.add(member)
    resumed = []
    for _ in range(6):
        clock.now += 0.0625
        resumed.append([members.index(member) for member in paused.resume()])
    assert resumed == [[0], [1], [], [2], [3], []]


def test_a_suspended_connection_is_resumed_once_and_not_before_its_time(http: ServerConnection, clock: Clock) -> None:
    paused, member = Paused[Member](), Member(http)
    paused.suspend(member, 1.0)
    paused.add(member)
    clock.now += 0.5
    list(paused.resume())
    assert member in paused
    paused.add(member)
    clock.now += 0.5
    assert list(paused.resume()) == [member]
    assert member not in paused


def test_nothing_is_kept_of_a_connection_that_has_ended(http: ServerConnection, clock: Clock) -> None:
    paused, member = Paused[Member](), Member(http)
    paused.suspend(member, 1.0)
    paused.add(member)
    paused.discard(member)
    paused.discard(member)
    clock.now += 2
    assert member not in paused
    assert list(paused.resume()) == []
