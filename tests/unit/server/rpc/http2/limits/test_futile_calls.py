"""Which clients cancel too many calls."""

from __future__ import annotations

import time

from tests.clock import Clock

from bngrad_server.rpc.http2.limits.futile_calls import FadingCounts, FutileCalls, is_before


def test_hundreds_of_cancelled_calls_at_once_are_too_many_for_a_while() -> None:
    clock = Clock()
    calls = FutileCalls(clock)
    for _ in range(250):
        calls.cancelled("bad")
    assert not calls.are_too_many("bad")
    for _ in range(250):
        calls.cancelled("bad")
    assert calls.are_too_many("bad")
    assert not calls.are_too_many("good")
    clock.now += 4
    assert not calls.are_too_many("bad")


def cancel_too_many(calls: FutileCalls) -> int:
    """Cancels calls until they are too many, and returns how many were cancelled."""
    count = 0
    while not calls.are_too_many("bad"):
        calls.cancelled("bad")
        count += 1
    return count


def test_each_time_a_client_may_cancel_fewer_calls_until_that_is_forgotten() -> None:
    clock = Clock()
    calls = FutileCalls(clock)
    counts = []
    for _ in range(4):
        counts.append(cancel_too_many(calls))
        clock.now += 4
    assert counts[0] == 257
    assert max(counts[1:]) < 100
    clock.now += 60
    assert cancel_too_many(calls) > 250


def test_a_client_may_cancel_as_many_calls_as_are_answered() -> None:
    calls = FutileCalls(Clock())
    for _ in range(10_000):
        calls.cancelled("hedging")
        calls.answered("hedging")
    assert not calls.are_too_many("hedging")


def test_an_answered_call_makes_up_for_one_before_it_and_for_none_to_come() -> None:
    calls = FutileCalls(Clock())
    calls.cancelled("bad")
    for _ in range(1000):
        calls.answered("bad")
    for _ in range(256):
        calls.cancelled("bad")
        calls.answered("bad")
        calls.cancelled("bad")
    assert not calls.are_too_many("bad")
    calls.cancelled("bad")
    assert calls.are_too_many("bad")


def test_only_the_latest_clients_are_remembered() -> None:
    calls = FutileCalls(Clock())
    for _ in range(500):
        calls.cancelled("first")
    for number in range(1000):
        calls.cancelled(str(number))
    assert not calls.are_too_many("first")


def test_clients_that_are_counted_again_are_remembered_and_those_with_nothing_left_are_not() -> None:
    counts = FadingCounts(1.0, Clock())
    for number in range(511):
        counts.add(f"passing {number}", 1)
        counts.add("again", 1)
    counts.add("passing 511", 1)
    counts.add("passing 512", 1)
    assert counts.of("again") == 511
    assert len(counts) == 512
    counts.add("again", -511)
    assert "again" not in counts


def test_no_count_grows_beyond_the_most() -> None:
    counts = FadingCounts(1.0, Clock(), most=5)
    for _ in range(2):
        counts.add("client", 4)
        counts.add("client", 4)
        assert counts.of("client") == 5


def test_calls_that_end_at_their_deadlines_are_not_cancelled() -> None:
    now = time.monotonic()
    assert is_before(None)
    assert is_before(now + 60)
    assert not is_before(now + 0.01)
    assert not is_before(now - 1)
