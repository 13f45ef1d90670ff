"""The model of a fleet, against queueing theory and against the SDK's own balancing."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from typing import Any, cast

import pytest
from benchmarks.fleet.balancing import BALANCINGS, Known, View, weighted
from benchmarks.fleet.model import Model, Outcome, Scenario

from bngrad._balancing.upstream import Upstream, Use, choose
from bngrad_wire.load_report import LoadReport

MEAN_S = 0.01


def simulate(
    balancing: str = "weighted", *, speeds: tuple[float, ...] = (1.0,), clients: int = 1, **options: Any
) -> Outcome:
    rng = random.Random(0)
    service = [rng.expovariate(1 / MEAN_S) for _ in range(10_000)]
    return Model(Scenario(speeds, clients, 0.5, service, 0.0, balancing, **options)).run()


def test_one_server_is_an_m_m_1_queue() -> None:
    outcome = simulate(seconds=200.0)
    rate = 1 / MEAN_S - 0.5 / MEAN_S
    assert outcome.p50_s == pytest.approx(math.log(2) / rate, rel=0.1)
    assert outcome.p99_s == pytest.approx(math.log(100) / rate, rel=0.15)
    assert outcome.goodput == 1


@pytest.mark.parametrize("balancing", BALANCINGS)
def test_no_request_is_lost_when_servers_die(balancing: str) -> None:
    outcome = simulate(balancing, speeds=(1.0,) * 8, clients=20, seconds=15.0, lifetime_s=10.0, replaced_after_s=1.0)
    assert outcome.goodput > 0.999
    assert outcome.offered > 1000


def test_the_choice_among_few_is_that_of_the_sdk() -> None:
    """Three servers of different speed, by a client that has all calls, and by one of many clients."""
    rng = random.Random(0)
    for others in (0.0, 1.0):
        real, view = [Upstream(cast("Any", None)) for _ in range(3)], View(rng)
        view.others = others
        in_flight: list[Use] = []
        for number, (server, rate, calls) in enumerate(zip(real, (30.0, 60.0, 90.0), (0, 1, 4), strict=True)):
            report = LoadReport(rate=rate, utilization=1.0, requests=3.0)
            server.note(report, 0)
            for use in (uses := [Use(server) for _ in range(calls)]):
                server.count(begun=use)
            in_flight += uses
            view.known[number] = Known(calls, report, report.capacity, reported_at=time.monotonic())
        theirs = Counter(real.index(choose(real, 1.0, others, 0)) for _ in range(3000))
        ours = Counter(weighted(view, range(3), time.monotonic(), rng) for _ in range(3000))
        assert [ours[number] / 3000 for number in range(3)] == pytest.approx(
            [theirs[number] / 3000 for number in range(3)], abs=0.05
        )
