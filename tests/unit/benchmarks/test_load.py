"""The load generator's arithmetic: arrival times, the mix of requests, and the figures made of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from benchmarks.load import measure, mix, report, targets
from benchmarks.load.answers import Expected, Status
from benchmarks.load.fleet import Run
from benchmarks.load.generator import Outcome, Row
from benchmarks.load.measure import Step
from benchmarks.load.results import Results
from benchmarks.load.schedule import arrivals

from bngrad_kernels.spec import BFLOAT16, FLOAT32

ITEMS = (mix.Item(mix.SMALL, 1),)
START = 1000.0


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_arrivals_come_at_the_rate_with_exponential_gaps() -> None:
    times = arrivals(1000, 100, rng())
    assert times[0] >= 0
    assert times[-1] < 100
    assert len(times) == pytest.approx(100_000, abs=4 * 100_000**0.5)
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1e-3, rel=0.02)
    assert gaps.std() == pytest.approx(1e-3, rel=0.02)  # as that of an exponential distribution is its mean
    assert np.mean(gaps > 2e-3) == pytest.approx(np.exp(-2), abs=0.005)


def test_a_deck_has_the_53_layers_in_every_variant_and_the_share_of_small_ones() -> None:
    count = sum(item.count for item in mix.MIXED)
    assert sum(mix.LAYERS.values()) == 53
    assert count == 4 * 53 + mix.SMALL_COUNT
    dealt = Counter(mix.deal(mix.MIXED, 3 * count, rng()).tolist())
    assert dealt == {i: 3 * item.count for i, item in enumerate(mix.MIXED)}
    sizes = {item.spec.tensor_nbytes for item in mix.MIXED}
    assert min(sizes) == 4096
    assert sorted(sizes)[1] == 2 * 512 * 7 * 7 * BFLOAT16.itemsize
    assert max(sizes) == 2 * 64 * 112 * 112 * FLOAT32.itemsize


@pytest.mark.parametrize("count", [0, 1, 236, 237])
def test_deal_returns_the_requested_count(count: int) -> None:
    assert len(mix.deal(mix.MIXED, count, rng())) == count


def row(due: float, sent: float, done: float, status: Status = Status.OK, *, waited: bool = False) -> Row:
    return 0, START + due, START + sent, START + done, int(status), waited


def step_of(rows: list[Row], seconds: float = 10, multiple: float | None = 2) -> Step:
    run = Run(START, seconds, Outcome(rows, 0, []))
    return measure.step("2 x", multiple, run, ITEMS, server_cores=None, generator_cores=0, batch_sizes=None)


def test_latency_counts_from_when_a_request_was_due() -> None:
    step = step_of([row(due=2, sent=2.5, done=3)])
    assert step.percentiles == pytest.approx([1000] * len(measure.PERCENTILES))


def test_goodput_counts_right_answers_after_the_first_second() -> None:
    rows = [row(0.2, 0.2, 0.5), row(0.9, 0.9, 1.1), row(5, 5, 5.1), row(9.5, 9.5, 10.5)]
    rows += [row(5, 5, 6, status) for status in Status if status is not Status.OK]
    step = step_of(rows)
    assert step.goodput == pytest.approx(2 / 9)
    assert step.megabytes == pytest.approx(2 * 3 * 4096 / 1e6 / 9)
    assert step.offered == pytest.approx(len(rows) / 10)
    assert step.counts == {status.name: 4 if status is Status.OK else 1 for status in Status}
    assert step.goodput_each_second == [1, 1, 0, 0, 0, 1, 0, 0, 0, 0]


def test_a_late_request_is_the_generators_fault_only_if_a_caller_was_free() -> None:
    step = step_of([row(2, 2, 3), row(2, 2.02, 3), row(2, 2.02, 3, waited=True), row(2, 2.02, 3, waited=True)])
    assert (step.late, step.no_caller) == (0.25, 0.5)


def test_requests_in_flight_are_those_sent_and_not_yet_answered() -> None:
    starts, ends = np.array([0.0, 1, 1, 4]), np.array([2.0, 2, 3, 5])
    moments = np.array([-1.0, 0, 1, 2, 3, 4, 6])
    assert measure.in_flight(moments, starts, ends).tolist() == [0, 1, 3, 1, 0, 1, 0]
    never_sent = row(1, 4, 4, Status.NOT_SENT)
    assert step_of([row(1, 1, 5), row(2, 2, 3), never_sent]).in_flight == 2


def test_wrong_and_stale_bits_are_found() -> None:
    right = np.arange(10_000, dtype=np.float32)
    expected = Expected(right)
    answer = right.copy()
    assert expected.is_in(answer)
    assert not expected.is_in(answer), "it was not written again"
    answer = right.copy()
    answer[5] += 1  # found only by comparing all elements
    assert sum(not expected.is_in(answer.copy()) for _ in range(128)) == 2


def test_an_overload_that_halves_goodput_misses_its_target() -> None:
    def load(multiple: float, count: int) -> Step:
        return step_of([row(2, 2, 2.5)] * count, multiple=multiple)

    flat = targets.verdicts(Results(2, turns=[load(1, 100), load(2, 95), load(3, 91)]))
    assert all(verdict.met for verdict in flat)
    halved = targets.verdicts(Results(2, turns=[load(1, 100), load(2, 95), load(3, 50)]))
    assert [v.figure for v in halved if not v.met] == pytest.approx([0.5, 0.5])


def test_the_middle_turn_of_a_load_counts() -> None:
    turns = [step_of([row(2, 2, 2.5)] * count, multiple=multiple) for count in (5, 90, 60) for multiple in (2, 1)]
    assert [(step.multiple, step.counts["OK"]) for step in Results(2, turns=turns).steps] == [(1, 60), (2, 60)]


def test_tables_replace_those_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n")
    results = Results(2, saturation=[step_of([row(2, 2, 3)], multiple=None)])
    report.write_into(page, results, targets.verdicts(results), "note")
    once = page.read_text()
    report.write_into(page, results, targets.verdicts(results), "note")
    assert page.read_text() == once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once
