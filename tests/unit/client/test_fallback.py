"""When calls are computed in this process, with errors that the tests make."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.clock import Clock

import bngrad
from bngrad._deadline import Cancellation
from bngrad._errors import (
    BngradError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotSharedError,
    ResourceExhaustedError,
    UnavailableError,
)
from bngrad._local import fallback as fallback_module
from bngrad._local.fallback import Fallback

LATE, GONE = DeadlineExceededError("late"), UnavailableError("gone")


@pytest.mark.parametrize(
    ("outcomes", "in_outage"),
    [
        ([GONE], True),
        ([LATE], False),
        ([LATE, LATE], True),
        ([LATE, None, LATE], False),
        ([LATE, GONE], True),
        ([LATE, LATE, None], False),
        ([LATE, LATE, None, LATE], False),
    ],
)
def test_an_outage_begins_with_a_server_that_has_gone_or_two_late_calls_in_a_row(
    outcomes: Sequence[BngradError | None], in_outage: bool
) -> None:
    fallback = Fallback("a client")
    for error in outcomes:
        if error is None:
            fallback.answered()
        else:
            fallback.failed(error)
    assert fallback.in_outage == in_outage
    assert fallback.is_pausing() == in_outage


@pytest.mark.parametrize(
    ("error", "is_covered"),
    [
        (GONE, True),
        (LATE, True),
        (NotSharedError("not shared"), False),
        (ResourceExhaustedError("full", 0.1), True),
        (ResourceExhaustedError("too large"), False),
        (InvalidArgumentError("wrong"), False),
    ],
)
def test_calls_are_computed_here_that_no_server_takes_now(error: BngradError, is_covered: bool) -> None:
    assert Fallback.covers(error) is is_covered


def test_the_pauses_of_an_outage_grow_to_a_minute_and_those_of_the_next_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, fallback = Clock(), Fallback("a client")
    monkeypatch.setattr(fallback_module, "time", clock)

    def pauses(count: int) -> list[float]:
        lengths = []
        for _ in range(count):
            fallback.failed(GONE)
            began = clock.now
            while fallback.is_pausing():
                clock.now += 0.5
            lengths.append(clock.now - began)
        return lengths

    assert pauses(9) == [1, 1, 2, 4, 8, 16, 32, 60, 60]
    fallback.answered()
    assert pauses(2) == [1, 1]


def test_the_first_outage_alone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fallback = Fallback("a client")
    for _ in range(2):
        fallback.failed(GONE)
        fallback.answered()
    (record,) = caplog.records
    assert record.getMessage() == "a client computes calls in this process while no server answers: gone"


def make_call(
    monkeypatch: pytest.MonkeyPatch, client: bngrad.Client, ask: Callable[[Cancellation, bool], object]
) -> Any:
    """Makes a call whose attempts are those of ``ask``, which gets its cancellation, and whether it may retry."""

    def attempts(
        _attempt: object, _deadline: object, cancellation: Cancellation, *, retries: bool, **_: object
    ) -> object:
        return ask(cancellation, retries)

    monkeypatch.setattr(client._calls, "_ask", attempts)
    tensor, vector = np.ones((1, 2, 2, 3), np.float32), np.ones(3, np.float32)
    return client.fused_batch_norm_grad_v2(tensor, tensor, vector, vector, vector)


def test_a_call_that_asks_the_servers_during_an_outage_makes_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(_: Cancellation, retries: bool) -> object:
        asked.append(retries)
        raise GONE

    with bngrad.Client("localhost:1", fallback="local") as client:
        fallback = client._calls._fallback
        assert fallback is not None
        for _ in range(2):
            make_call(monkeypatch, client, ask)
            fallback._pause_ends_at = 0.0  # the next call asks the servers
        assert asked == [True, False]
        make_call(monkeypatch, client, lambda _cancellation, _retries: None)
        assert not fallback.in_outage
        assert client.fallback_calls == 2


def test_a_call_that_is_cancelled_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(cancellation: Cancellation, _: bool) -> object:
        cancellation.cancel()
        raise GONE

    with bngrad.Client("localhost:1", fallback="local") as client:
        with pytest.raises(UnavailableError, match="gone"):
            make_call(monkeypatch, client, ask)
        assert client.fallback_calls == 0


def test_closing_frees_the_memory_of_results_that_were_computed_here() -> None:
    client = bngrad.Client("localhost:1", fallback="local")
    assert client._calls._fallback is not None
    pool = client._calls._fallback.kernels._pool
    pool.empty((1000,), np.dtype(np.uint8))
    (region,) = map(weakref.ref, pool._regions)
    client.close()
    assert region() is None
