"""Retries: the waits, the budget, the end."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.clock import Clock
from tests.garbage import no_exceptions_left

from bngrad._balancing import retry
from bngrad._balancing.retry import Attempts, RetryBudget, delay_s
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import (
    BngradError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotSharedError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)


def attempts(timeout: float = 60) -> Attempts:
    return Attempts(Deadline.after(timeout), time.monotonic())


@given(st.integers(1, 10**9), st.none() | st.floats(0, 1e6))
def test_a_wait_is_bounded_and_never_shorter_than_the_hint(failures: int, hint_s: float | None) -> None:
    delay = delay_s(failures, hint_s)
    assert (hint_s or 0) <= delay <= max(0.05 * 2 ** min(failures - 1, 6), (hint_s or 0) * 1.25)
    assert delay <= max(2, (hint_s or 0) * 1.25)


@pytest.mark.parametrize(
    ("failures", "hint_s", "low", "high"), [(1, None, 0, 0.05), (4, None, 0, 0.4), (1, 8, 8, 10), (7, 0.1, 0.1, 2)]
)
def test_waits_fill_their_range(failures: int, hint_s: float | None, low: float, high: float) -> None:
    delays = [delay_s(failures, hint_s) for _ in range(1000)]
    assert min(delays) < low + (high - low) / 10
    assert max(delays) > high - (high - low) / 10


@given(st.integers(1, 40), st.none() | st.floats(0, 30), st.floats(0.001, 20))
def test_no_wait_passes_the_deadline(failures: int, hint_s: float | None, timeout: float) -> None:
    error = UnavailableError("gone") if hint_s is None else ResourceExhaustedError("full", hint_s)
    made, waits = attempts(timeout), Waits()
    for _ in range(failures):
        made.failed("a", error)
    before = time.monotonic()
    with suppress(type(error)):
        made.wait(False, waits)
    assert before + waits.seconds < before + timeout


class Waits(Cancellation):
    """Records how long a wait would be."""

    seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds = seconds


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("bad"),
        DeadlineExceededError("late"),
        InternalError("broken"),
        UnimplementedError("unknown"),
        ResourceExhaustedError("larger than the arena"),
        BngradError("forbidden"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_permanent_errors_are_raised_at_once(error: BngradError) -> None:
    text = str(error)
    with pytest.raises(type(error)) as raised:
        attempts().failed("a", error)
    assert raised.value is error
    assert str(error) == text


def test_a_server_is_waited_for_and_then_tried_again() -> None:
    made = attempts()
    made.failed("a", ResourceExhaustedError("full", 0.5))
    assert made.excluded(False) == {"a"}
    made.wait(False, Cancellation())
    assert made.excluded(False) == set()


@pytest.mark.parametrize("timeout", [60.0, math.inf])
def test_a_server_that_shares_nothing_is_not_tried_again(timeout: float) -> None:
    made, error = attempts(timeout), NotSharedError("elsewhere")
    made.failed("a", error)
    assert made.excluded(False) == {"a"}
    with pytest.raises(NotSharedError):
        made.wait(False, Waits())


def test_where_that_is_hopeless_a_server_that_is_not_available_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    made = Attempts(Deadline.after(60.0), clock.now)
    made.failed("a", UnavailableError("gone"))
    clock.now += 3.0
    assert (made.excluded(False), made.excluded(True)) == (set(), {"a"})
    with pytest.raises(UnavailableError, match=r"^gone$"):
        made.wait(True, Waits())


def test_a_server_whose_memory_is_all_leased_is_asked_again_for_about_a_second() -> None:
    made, waits, slept_s = attempts(60.0), Waits(), 0.0
    for _ in range(5):
        made.failed("a", NotSharedError("full", is_full=True))
        made.wait(False, waits)
        slept_s += waits.seconds
    made.failed("a", NotSharedError("full", is_full=True))
    with pytest.raises(NotSharedError, match=r"^full \(6 attempts in"):
        made.wait(False, waits)
    assert 0 < slept_s < 1.6


def test_without_a_deadline_an_unavailable_server_is_tried_five_times_and_a_full_one_forever() -> None:
    made, full, waits = attempts(math.inf), attempts(math.inf), Waits()
    for _ in range(4):
        made.failed("a", UnavailableError("gone"))
        made.wait(False, waits)
    made.failed("a", UnavailableError("gone"))
    with pytest.raises(UnavailableError, match=r"^gone \(5 attempts in \d+\.\d s\)$"):
        made.wait(False, waits)
    for _ in range(50):
        full.failed("a", ResourceExhaustedError("full", 9))
        full.wait(True, waits)
    assert waits.seconds >= 9


def test_a_call_with_little_patience_tries_another_server_but_none_twice_once_it_is_over() -> None:
    made = Attempts(Deadline.after(60.0), time.monotonic() - 10.0, patience_s=10.0)
    made.failed("a", UnavailableError("gone"))
    assert made.excluded(False) == {"a"}
    with pytest.raises(UnavailableError, match="gone"):
        made.wait(False, Cancellation())


def test_patience_is_for_servers_that_are_not_available() -> None:
    made, waits = Attempts(Deadline.after(60.0), time.monotonic() - 10.0, patience_s=10.0), Waits()
    made.failed("a", ResourceExhaustedError("full", 9))
    made.wait(False, waits)
    assert waits.seconds >= 8.5


def test_without_a_deadline_a_call_goes_on_while_a_server_was_tried_less_often() -> None:
    made = attempts(math.inf)
    for _ in range(9):
        made.failed("a", UnavailableError("gone"))
    made.failed("b", UnavailableError("gone"))
    made.wait(False, Waits())


def test_a_wait_counts_no_server_that_could_be_tried_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is no longer among the targets."""
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    made, waits = attempts(math.inf), Waits()
    made.failed("a", ResourceExhaustedError("full", 0.0))
    made.failed("b", ResourceExhaustedError("full", 9.0))
    clock.now += 1.0
    made.wait(False, waits)
    assert waits.seconds >= 8.0


@pytest.mark.parametrize("link", ["__cause__", "__context__"])
def test_an_error_that_is_kept_while_a_call_is_repeated_keeps_no_frames(link: str) -> None:
    error, reason = UnavailableError("gone"), OSError("reset")
    for each in (error, reason):
        with suppress(type(each)):
            raise each
    setattr(error, link, reason)
    attempts().failed("a", error)
    assert error.__traceback__ is reason.__traceback__ is None


@pytest.mark.parametrize("error", [UnavailableError, InternalError])
def test_the_last_error_is_left_to_the_caller(error: type[BngradError]) -> None:
    def give_up() -> None:
        made = attempts()
        made.failed("a", error("gone"))
        made.wait(True, Waits())

    with no_exceptions_left(), suppress(error):
        give_up()


@pytest.mark.parametrize(
    ("first", "last", "before"),
    [
        (UnavailableError("gone"), InternalError("broken"), ", before this one: gone"),
        (ResourceExhaustedError("full", 0.5), ResourceExhaustedError("broken"), ""),
    ],
    ids=["another", "the same"],
)
def test_an_error_says_how_many_attempts_came_before_and_what_else_failed(
    first: BngradError, last: BngradError, before: str
) -> None:
    made = attempts()
    made.failed("a", first)
    with pytest.raises(type(last), match=rf"^broken \(2 attempts in \d+\.\d s{before}\)$"):
        made.failed("a", last)


def test_cancelling_ends_the_wait() -> None:
    made, cancellation = attempts(), Cancellation()
    made.failed("a", ResourceExhaustedError("full", 50))
    threading.Timer(0.05, cancellation.cancel).start()
    begin = time.monotonic()
    with pytest.raises(ResourceExhaustedError):
        made.wait(False, cancellation)
    assert time.monotonic() - begin < 30


def test_a_budget_is_used_up_in_an_outage_and_refilled_by_answers() -> None:
    budget = RetryBudget()
    failures = 0
    while budget.allows:
        budget.failed(1)
        failures += 1
    assert failures == 31
    for _ in range(9):
        budget.succeeded()
    assert not budget.allows
    budget.succeeded()
    budget.succeeded()
    assert budget.allows


@given(st.lists(st.integers(0, 64), max_size=300))
@example([64, 0])
@example([1] * 61)
def test_a_budget_stays_within_its_bounds(steps: list[int]) -> None:
    budget = RetryBudget()
    for callers in steps:
        if callers:
            budget.failed(callers)
        else:
            budget.succeeded()
        assert 0 <= budget._left <= RetryBudget.tokens


def test_calls_in_flight_share_the_cost_of_a_failure() -> None:
    budget = RetryBudget()
    for _ in range(29 * 64):
        budget.failed(64)
    assert budget.allows
