"""Admission control, with a clock that the tests set."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.clock import Clock

from bngrad_server.errors import OverloadedError, RequestTooLargeError
from bngrad_server.scheduling import admission
from bngrad_server.scheduling.admission import Admission

MB = 2**20
ALWAYS = 16


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(admission, "time", clock)
    return clock


def work_at(gate: Admission, clock: Clock, nbytes_per_s: float, seconds: float) -> None:
    """Has requests enter and leave, ten at a time, at a rate of bytes; each counts for more than its bytes."""
    nbytes = 8 * MB - 2**18
    for _ in range(10):
        gate.enter("worker", nbytes, None)
    for _ in range(int(seconds * nbytes_per_s / (8 * MB))):
        gate.enter("worker", nbytes, None)
        clock.now += 8 * MB / nbytes_per_s
        gate.leave("worker", nbytes, computed=True)
    for _ in range(10):
        gate.leave("worker", nbytes, computed=False)


def crowd(gate: Admission, client: str, nbytes: int, deadline: float | None = None) -> int:
    """How many requests are admitted before one is rejected."""
    for count in range(10_000):
        try:
            gate.enter(client, nbytes, deadline)
        except OverloadedError:
            return count
    raise AssertionError("there is no limit")


@pytest.mark.parametrize("most", [1, 100])
def test_requests_are_limited_in_number_whatever_their_size(most: int) -> None:
    gate = Admission(max_requests=most, max_wait_s=5)
    assert crowd(gate, "a", 0) == most
    assert gate.admitted == most
    with pytest.raises(OverloadedError, match=f"the server is full: {most} requests"):
        gate.enter("a", 0, None)
    assert crowd(gate, "b", 0) == most // 2


def test_work_is_limited_to_what_was_lately_done_within_the_longest_wait(clock: Clock) -> None:
    gate = Admission(max_requests=10_000, max_wait_s=2)
    work_at(gate, clock, 64 * MB, seconds=3)
    assert crowd(gate, "a", MB - 2**18) == 128


@pytest.mark.parametrize(("rest_s", "admitted"), [(100, 128), (1, 32), (0, ALWAYS), (-1, ALWAYS)])
def test_a_request_with_little_time_is_admitted_only_if_the_wait_is_shorter(
    clock: Clock, rest_s: float, admitted: int
) -> None:
    gate = Admission(max_requests=10_000, max_wait_s=2)
    work_at(gate, clock, 64 * MB, seconds=3)
    assert crowd(gate, "a", MB - 2**18, clock.now + rest_s) == admitted
    if admitted < 128:
        gate.enter("a", MB, None)


@pytest.mark.parametrize(("seconds", "admitted"), [(2, 128), (6, 64)])
def test_the_rate_is_the_highest_of_the_last_four_seconds(clock: Clock, seconds: float, admitted: int) -> None:
    gate = Admission(max_requests=10_000, max_wait_s=2)
    work_at(gate, clock, 64 * MB, seconds=3)
    work_at(gate, clock, 32 * MB, seconds)
    assert crowd(gate, "a", MB - 2**18) == admitted


def test_the_last_place_is_for_any_client() -> None:
    gate = Admission(max_requests=100, max_wait_s=5)
    for client in "a" * 80 + "b" * 19 + "a":
        gate.enter(client, 0, None)


def test_a_few_requests_are_always_admitted(clock: Clock) -> None:
    gate = Admission(max_requests=10_000, max_wait_s=0.1)
    work_at(gate, clock, MB, seconds=30)
    assert crowd(gate, "a", 100 * MB) == ALWAYS


def test_the_requests_of_one_client_keep_no_other_client_out(clock: Clock) -> None:
    gate = Admission(max_requests=100, max_wait_s=5)
    assert crowd(gate, "greedy", 0) == 100
    assert crowd(gate, "b", 0) == 50
    assert crowd(gate, "c", 0) == 33
    assert crowd(gate, "greedy", 0) == 0


def test_a_server_is_never_more_than_twice_full() -> None:
    gate = Admission(max_requests=100, max_wait_s=5)
    for client in range(300):
        crowd(gate, str(client), 0)
    assert gate.admitted == 200


@pytest.mark.parametrize(("nbytes", "delay_s"), [(2**18, 0.02), (32 * MB, 0.5), (640 * MB, 5.0)])
def test_the_retry_delay_is_the_time_until_there_is_room_within_limits(
    clock: Clock, nbytes: int, delay_s: float
) -> None:
    gate = Admission(max_requests=10_000, max_wait_s=2)
    work_at(gate, clock, 64 * MB, seconds=3)
    crowd(gate, "a", MB - 2**18)
    with pytest.raises(OverloadedError, match=r"about 2\.0 s of work") as refused:
        gate.enter("a", nbytes - 2**18, None)
    assert refused.value.retry_delay_s == pytest.approx(delay_s)


def test_requests_that_were_not_computed_do_not_count_in_the_rate(clock: Clock) -> None:
    gate = Admission(max_requests=10_000, max_wait_s=2)
    work_at(gate, clock, 64 * MB, seconds=3)
    for _ in range(10):
        gate.enter("standing", MB, None)
    for _ in range(20):
        gate.enter("a", 10 * MB, None)
        clock.now += 0.1
        gate.leave("a", 10 * MB, computed=False)
    for _ in range(10):
        gate.leave("standing", MB, computed=False)
    assert crowd(gate, "a", MB - 2**18) == 128


@pytest.mark.parametrize(("standing", "admitted"), [(7, 93), (8, ALWAYS - 8)])
def test_the_rate_is_measured_while_eight_requests_are_in_the_server(
    clock: Clock, standing: int, admitted: int
) -> None:
    gate = Admission(max_requests=100, max_wait_s=1)
    for _ in range(standing):
        gate.enter("standing", 0, None)
    for _ in range(10):
        gate.enter("a", MB, None)
        clock.now += 1
        gate.leave("a", MB, computed=True)
    assert crowd(gate, "standing", 100 * MB) == admitted


def test_a_server_that_was_never_busy_has_no_rate(clock: Clock) -> None:
    gate = Admission(max_requests=100, max_wait_s=2)
    for _ in range(100):
        gate.enter("a", MB, None)
        clock.now += 0.1
        gate.leave("a", MB, computed=True)
    assert crowd(gate, "a", 100 * MB) == 100


def test_a_client_that_stalls_keeps_no_other_client_out(clock: Clock) -> None:
    gate = Admission(max_requests=100, max_wait_s=1)
    for _ in range(50):
        gate.enter("slow", 100 * MB, None)
    for _ in range(100):
        for _ in range(3):
            gate.enter("quick", MB, None)
        clock.now += 0.1
        for _ in range(3):
            gate.leave("quick", MB, computed=True)


def test_transfers_that_stall_do_not_count_in_the_rate(clock: Clock) -> None:
    gate = Admission(max_requests=100, max_wait_s=1)
    with ExitStack() as standing:
        for _ in range(50):
            gate.enter("slow", MB, None)
            standing.enter_context(gate.transfer())
        for _ in range(20):
            gate.enter("rare", 0, None)
            clock.now += 3
            gate.leave("rare", 0, computed=True)
        assert crowd(gate, "rare", 100 * MB) == 50


def test_a_server_that_becomes_slow_admits_less(clock: Clock) -> None:
    gate = Admission(max_requests=10_000, max_wait_s=2)
    work_at(gate, clock, 64 * MB, seconds=3)
    full = crowd(gate, "a", MB)
    for _ in range(200):  # 10 MB/s, and always full
        clock.now += 0.1
        gate.leave("a", MB, computed=True)
        full += crowd(gate, "a", MB) - 1
    assert gate.admitted < 30
    assert gate.admitted == full


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50 * MB)), max_size=200))
def test_nothing_is_counted_once_all_have_left(requests: list[tuple[str, int]]) -> None:
    gate = Admission(max_requests=20, max_wait_s=5)
    inside = Counter[tuple[str, int]]()
    for client, nbytes in requests:
        try:
            gate.enter(client, nbytes, None)
            inside[client, nbytes] += 1
        except OverloadedError:
            pass
    for client, nbytes in inside.elements():
        gate.leave(client, nbytes, computed=True)
    assert gate.admitted == 0
    assert not gate._requests_of
    assert not gate._work_of
    assert gate._work == 0


def test_the_requests_of_a_client_are_limited() -> None:
    gate = Admission(256, 5.0, max_client_requests=2)
    for _ in range(2):
        gate.enter("greedy", MB, None)
    with pytest.raises(OverloadedError, match="has 2 requests in progress already") as refused:
        gate.enter("greedy", 0, None)
    assert 0 < refused.value.retry_delay_s < 1
    with pytest.raises(OverloadedError, match="has 2 requests in progress already"):
        gate.check("greedy", None)
    with pytest.raises(OverloadedError, match="has 2 requests in progress already"):
        gate.pass_through("greedy", 0, None)
    gate.enter("modest", MB, None)
    gate.leave("greedy", MB, computed=True)
    gate.enter("greedy", MB, None)


def test_the_bytes_of_a_client_are_limited() -> None:
    gate = Admission(256, 5.0, max_client_bytes=10 * MB)
    gate.enter("greedy", 4 * MB, None)
    gate.enter("greedy", 6 * MB, None)
    with pytest.raises(OverloadedError, match=f"more than the {10 * MB} bytes that it may have"):
        gate.enter("greedy", 1, None)
    gate.enter("modest", 10 * MB, None)
    for nbytes in (4 * MB, 6 * MB):
        gate.leave("greedy", nbytes, computed=True)
    gate.enter("greedy", 10 * MB, None)


@pytest.mark.parametrize("limits", [{"max_client_bytes": 10 * MB}, {"max_client_requests": 2}])
def test_who_was_refused_for_its_limits_is_so_again_until_there_is_room_for_the_same(limits: dict[str, int]) -> None:
    gate, left = Admission(256, 5.0, **limits), []
    gate.on_leave.append(lambda: left.append(gate.is_worthwhile("greedy")))
    for _ in range(2):
        gate.enter("greedy", 5 * MB, None)
    assert gate.is_worthwhile("greedy")
    with pytest.raises(OverloadedError):
        gate.enter("greedy", 4 * MB, None)
    assert not gate.is_worthwhile("greedy")
    assert gate.is_worthwhile("modest")
    gate.leave("greedy", 5 * MB, computed=True)
    assert left == [True]
    gate.enter("greedy", 5 * MB, None)
    assert gate.is_worthwhile("greedy")  # the next one may be smaller


def test_a_client_whose_large_request_was_refused_may_try_a_small_one_after_some_seconds(clock: Clock) -> None:
    gate = Admission(256, 5.0, max_client_bytes=10 * MB)
    gate.enter("client", 5 * MB, None)
    with pytest.raises(OverloadedError):
        gate.enter("client", 9 * MB, None)
    assert not gate.is_worthwhile("client")
    clock.now += 5
    assert gate.is_worthwhile("client")


def test_who_has_nothing_is_always_worth_a_try() -> None:
    gate = Admission(256, 5.0, max_client_requests=1)
    gate.enter("client", MB, None)
    with pytest.raises(OverloadedError):
        gate.enter("client", MB, None)
    gate.leave("client", MB, computed=False)
    assert gate.is_worthwhile("client")
    assert not gate._refused_of


@pytest.mark.parametrize("other_nbytes", [0, 10 * MB])
def test_a_request_beyond_the_limit_of_a_client_is_refused_for_good(other_nbytes: int) -> None:
    gate = Admission(256, 5.0, max_client_bytes=10 * MB)
    gate.enter("greedy", other_nbytes, None)
    with pytest.raises(RequestTooLargeError, match=f"of 11534336 bytes is more than the {10 * MB} .*max_client_bytes"):
        gate.enter("greedy", 11 * MB, None)


def test_the_rate_is_measured_after_transfers_have_ended(clock: Clock) -> None:
    gate = Admission(max_requests=10_000, max_wait_s=2)
    for _ in range(1000):
        with gate.transfer():
            pass
    work_at(gate, clock, 64 * MB, seconds=3)
    assert crowd(gate, "a", MB - 2**18) == 128


def test_a_message_counts_while_it_is_received_alone() -> None:
    gate = Admission(max_requests=100, max_wait_s=5, max_client_bytes=10 * MB)
    for _ in range(3):
        with gate.receiving("a", 8 * MB, None):
            with pytest.raises(OverloadedError):
                gate.enter("a", 8 * MB, None)
            with pytest.raises(OverloadedError), gate.receiving("a", 8 * MB, None):
                pass
    assert not gate._received_of
    assert not gate._refused_of


def test_the_room_of_a_client_is_what_its_requests_and_messages_leave() -> None:
    gate = Admission(max_requests=100, max_wait_s=5, max_client_bytes=10 * MB)
    gate.enter("a", 4 * MB, None)
    with gate.receiving("a", MB, None):
        assert [gate.room(client) for client in "ab"] == [5 * MB, 10 * MB]
    assert gate.room("a") == 6 * MB
    assert Admission(max_requests=100, max_wait_s=5, max_client_requests=1).room("a") == math.inf


def test_a_time_in_which_all_waited_for_their_clients_does_not_count_in_the_rate(clock: Clock) -> None:
    gate = Admission(max_requests=100, max_wait_s=1)
    for _ in range(20):
        gate.enter("a", 0, None)
    clock.now += 1
    gate.leave("a", 0, computed=True)  # ends a window, and begins one in which the server is busy at first
    with ExitStack() as transfers:
        for _ in range(19):
            transfers.enter_context(gate.transfer())
        clock.now += 10
    gate.leave("a", 0, computed=True)
    assert crowd(gate, "a", 100 * MB) == 100 - 18


def test_a_time_in_which_all_had_left_does_not_count_in_the_rate(clock: Clock) -> None:
    gate = Admission(max_requests=100, max_wait_s=1)
    for _ in range(2):
        for _ in range(20):
            gate.enter("a", 0, None)
        clock.now += 1
        gate.leave("a", 0, computed=True)  # ends a window, and begins one in which the server is busy at first
        for _ in range(19):
            gate.leave("a", 0, computed=False)
        clock.now += 10
    assert crowd(gate, "a", 100 * MB) == 100
