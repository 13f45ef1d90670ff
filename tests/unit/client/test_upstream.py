"""The choice among servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.clock import Clock

from bngrad._balancing import upstream
from bngrad._balancing.upstream import Upstream, Use, choose
from bngrad_wire.load_report import LoadReport


def server(rate: float = 0.0) -> Upstream:
    """Returns a server with a report of its rate under full load, if that is not 0."""
    made = Upstream(cast(Any, None))
    if rate:
        made.note(LoadReport(rate, 1.0, 1.0), 0)
    return made


def begin(server: Upstream, calls: int = 1) -> list[Use]:
    """Begins calls to a server, which are in flight as long as what is returned."""
    uses = [Use(server) for _ in range(calls)]
    for use in uses:
        server.count(begun=use)
    return uses


def share(
    servers: Sequence[Upstream], times: int = 2000, usual: float = 1.0, others: float = 0.0, calls: int = 0
) -> list[float]:
    """Returns what part of the calls each gets."""
    chosen = Counter(id(choose(servers, usual, others, calls)) for _ in range(times))
    return [chosen[id(each)] / times for each in servers]


def test_the_server_with_the_fewest_calls_gets_the_next_one() -> None:
    servers = [server(), server(), server()]
    uses = list(map(begin, servers, [2, 1, 3]))
    assert share(servers) == [0, 1, 0]
    del uses[2]
    assert share(servers) == [0, 0, 1]


def test_equal_servers_get_equal_shares() -> None:
    assert share([server(), server(), server()]) == pytest.approx([1 / 3] * 3, abs=0.06)
    assert share([server(rate=100), server(rate=105), server()], usual=102) == pytest.approx([1 / 3] * 3, abs=0.06)


def test_calls_are_divided_by_speed() -> None:
    servers = [server(rate=300), server(rate=100)]
    uses = [begin(choose(servers, 200.0, 0.0, 0)) for _ in range(400)]
    assert servers[0].in_flight == pytest.approx(300, abs=20)
    assert servers[0].in_flight + servers[1].in_flight == len(uses)


def test_calls_are_divided_by_speed_at_random_if_most_requests_are_those_of_others() -> None:
    servers = [server(rate=300), server(rate=100)]
    assert share(servers, others=0.0) == [1, 0]
    assert share(servers, others=1.0) == pytest.approx([0.75, 0.25], abs=0.06)


def test_the_part_of_the_requests_that_are_own_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(upstream, "time", SimpleNamespace(monotonic=lambda: now))
    busy = server()
    uses = begin(busy, 3)
    now += 1.0
    assert busy.note(LoadReport(100, 1.0, 12.0), 0) == pytest.approx(0.25)
    now += 1.0
    assert busy.note(LoadReport(100, 1.0, 2.0), 0) == 1.0  # an older number than that of the calls
    for use in uses:
        busy.count(ended=use)
    now += 1.0
    assert busy.note(LoadReport(100, 1.0, 12.0), 0) == pytest.approx(0)
    assert busy.note(LoadReport(0, 0.0, 0.0), 0) is None


def test_what_a_server_reported_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(upstream, "time", SimpleNamespace(monotonic=lambda: now))
    servers = [server(rate=300), server(rate=100)]
    assert share(servers, calls=8) == [1, 0]
    now += 10
    servers[0].note(LoadReport(300, 1.0, 0.0), 8)
    assert share(servers, usual=300, calls=8) == pytest.approx([0.5, 0.5], abs=0.06)


def test_a_client_that_calls_seldom_remembers_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(upstream, "time", SimpleNamespace(monotonic=lambda: now))
    servers = [server(), server()]
    for each, rate in zip(servers, (300, 100), strict=True):
        each.note(LoadReport(rate, 1.0, 1.0), 1000)
    now += 10
    assert share(servers, usual=300, calls=1007) == [1, 0]
    now += 10
    assert share(servers, usual=300, calls=1007) == pytest.approx([0.5, 0.5], abs=0.06)


def test_a_client_of_many_servers_remembers_for_as_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it compares some of them alone."""
    clock = Clock()
    monkeypatch.setattr(upstream, "time", clock)
    servers = [server(rate) for rate in (300, *[100] * 19)]
    clock.now += 10
    assert share(servers, usual=300, calls=70)[0] == pytest.approx(0.8, abs=0.06)
    assert share(servers, usual=300, calls=90)[0] < 0.2


def test_a_server_is_silent_that_has_calls_and_ends_none_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(upstream, "time", clock)
    stuck = server()
    clock.now += 60
    first, second, third = begin(stuck, 3)
    assert not stuck.is_silent  # it had no calls before
    for use in (first, second):
        clock.now += 0.9
        stuck.count(ended=use)
        assert not stuck.is_silent
    for seconds, is_silent in [(0.9, False), (0.2, True)]:
        clock.now += seconds
        stuck.count()
        assert stuck.is_silent is is_silent
    stuck.hear()
    assert not stuck.is_silent
    assert stuck.in_flight == 1
    del third


def test_of_many_servers_some_are_compared() -> None:
    servers = [server() for _ in range(100)]
    uses = list(map(begin, servers[1:]))
    assert share(servers, 4000)[0] == pytest.approx(0.16, abs=0.06)
    del uses
    assert all(part < 0.05 for part in share([server() for _ in range(100)], 4000))
