from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.clock import Clock
from tests.garbage import no_exceptions_left

from bngrad_server.errors import RETRY_DELAY_S, ArenaTooSmallError, OverloadedError
from bngrad_server.memory import allocator, lost_transfers
from bngrad_server.memory.allocator import Allocator, Block
from bngrad_server.memory.layout import ALIGNMENT

TIMEOUT_S = 30.0


def units(count: int) -> int:
    return count * ALIGNMENT


class Crowd:
    """Requests that wait in threads; says who got memory, in order."""

    def __init__(self, memory: Allocator) -> None:
        self.memory = memory
        self.order: list[str] = []
        self._threads = ThreadPoolExecutor(64)

    def ask(self, name: str, count: int, client: str | None = None) -> Future[Block]:
        """Asks for memory, and returns once the request waits or has it."""
        before = len(self.memory.usage().waiting)

        def take() -> Block:
            block = self.memory.allocate(units(count), client or name, time.monotonic() + TIMEOUT_S)
            self.order.append(name)
            return block

        future = self._threads.submit(take)
        while not future.done() and len(self.memory.usage().waiting) == before:
            time.sleep(0.001)
        return future


def hand_on(memory: Allocator, held: Block, futures: list[Future[Block]]) -> Block:
    """Frees a block for the next of the requests that wait, and returns what that got."""
    memory.free(held)
    future = next(as_completed(futures, TIMEOUT_S))
    futures.remove(future)
    return future.result()


@given(st.data())
def test_blocks_are_aligned_disjoint_and_all_memory_comes_back(data: st.DataObject) -> None:
    memory = Allocator(units(64), units(data.draw(st.sampled_from([0, 32]))))
    held: list[Block] = []
    for _ in range(data.draw(st.integers(0, 40))):
        nbytes = data.draw(st.integers(0, units(10)))
        if data.draw(st.booleans()) and held:
            memory.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        try:
            held.append(memory.allocate(nbytes, data.draw(st.sampled_from("ab")), deadline=0))
        except TimeoutError:
            continue
        assert held[-1].offset % ALIGNMENT == 0
        assert held[-1].nbytes >= nbytes
        ordered = sorted(held)
        assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(ordered))
        assert ordered[-1].offset + ordered[-1].nbytes <= memory.nbytes + memory.reserve_nbytes
        assert memory.used_bytes == sum(block.nbytes for block in held)
    for block in held:
        memory.free(block)
    assert memory.usage() == ((), {}, {}, memory.nbytes)
    assert memory.allocate(memory.nbytes, "a", deadline=0) == Block(0, memory.nbytes, "a")


def test_memory_that_was_touched_is_handed_out_first() -> None:
    memory = Allocator(units(16))
    first = memory.allocate(units(1), "a")
    memory.allocate(units(1), "a")
    memory.free(first)
    assert memory.allocate(units(1), "a") == first


def test_a_request_larger_than_the_memory_is_refused_at_once() -> None:
    with pytest.raises(ArenaTooSmallError, match=r"needs 1024 bytes .* has 512"):
        Allocator(512, 4096).allocate(1024, "a")


def test_small_requests_pass_a_large_one_within_bounds() -> None:
    """They amount to its own size twice: their turns end before its own, and then it does not fit."""
    memory = Allocator(units(10))
    crowd = Crowd(memory)
    held = memory.allocate(units(1), "slow")
    large = crowd.ask("large", 10)
    small = [crowd.ask("small", 1) for _ in range(40)]
    freed: list[Block] = []

    def free_small() -> None:
        for future in small:
            if future.done() and all(future.result() is not block for block in freed):
                freed.append(future.result())
                memory.free(freed[-1])

    while len(memory.usage().held) > 1:
        free_small()
        time.sleep(0.001)
    assert 10 <= len(freed) <= 20
    assert not large.done()
    memory.free(held)
    memory.free(large.result(TIMEOUT_S))
    while not all(future.done() for future in small):
        free_small()
        time.sleep(0.001)


def test_clients_that_wait_take_turns() -> None:
    memory = Allocator(units(4))
    crowd = Crowd(memory)
    held = memory.allocate(units(4), "before")
    futures = [crowd.ask("greedy", 4) for _ in range(4)]
    futures += [crowd.ask(name, 4) for name in ("modest", "late")]
    while futures:
        held = hand_on(memory, held, futures)
    assert crowd.order == ["greedy", "modest", "late", "greedy", "greedy", "greedy"]


def test_a_client_that_comes_late_has_its_turn_among_the_next_ones_of_those_that_waited() -> None:
    memory = Allocator(units(4))
    crowd = Crowd(memory)
    held = memory.allocate(units(4), "before")
    futures = [crowd.ask(name, 4) for _ in range(4) for name in ("one", "two")]
    for _ in range(4):
        held = hand_on(memory, held, futures)
    futures.append(crowd.ask("late", 4))
    while futures:
        held = hand_on(memory, held, futures)
    assert crowd.order == [*["one", "two"] * 3, "late", "one", "two"]


def test_what_clients_had_counts_no_longer_once_no_request_waits() -> None:
    memory = Allocator(units(4))
    crowd = Crowd(memory)
    held = memory.allocate(units(4), "before")
    futures = [crowd.ask("greedy", 4) for _ in range(3)]
    while futures:
        held = hand_on(memory, held, futures)
    assert not memory._clocks  # or every client would be remembered for ever
    futures = [crowd.ask("greedy", 4), crowd.ask("modest", 4)]
    while futures:
        held = hand_on(memory, held, futures)
    assert crowd.order[3:] == ["greedy", "modest"]


def test_small_requests_have_the_reserve() -> None:
    memory = Allocator(units(32), units(32))
    everything = memory.allocate(units(32), "large")
    small = memory.allocate_at_once(units(8), "small")
    assert small == Block(units(32), units(8), "small")
    assert memory.allocate_at_once(units(7), "medium") is None
    assert memory.allocate_at_once(units(6), "small") == Block(units(40), units(6), "small")
    memory.free(everything)
    assert memory.allocate_at_once(units(32), "large") == everything


def test_small_requests_leave_some_of_the_reserve_to_smaller_ones() -> None:
    memory = Allocator(units(64), units(256))
    memory.allocate(units(64), "large")
    for size in (64, 32, 16, 8, 4, 2):
        while memory.allocate_at_once(units(size), "greedy") is not None:
            pass
    assert memory.allocate_at_once(units(1), "small") is not None


def test_small_requests_beyond_the_reserve_take_other_memory_or_wait_for_either() -> None:
    memory = Allocator(units(2), units(16))
    for _ in range(13):
        first = memory.allocate(units(1), "a")
    assert memory.allocate(units(1), "b") == Block(0, units(1), "b")
    memory.allocate(units(1), "b")
    waiting = Crowd(memory).ask("c", 1)
    memory.free(first)
    assert waiting.result(TIMEOUT_S) == first._replace(client="c")


def test_a_client_that_lost_transfers_may_have_less_and_less_memory_for_some_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0  # the steps are exact as well, so that 60 s are no more than 60 s
    monkeypatch.setattr(time, "monotonic", lambda: now)
    memory = Allocator(units(64))

    def can_have(count: int) -> bool:
        try:
            memory.free(memory.allocate(units(count), "slow"))
        except OverloadedError as error:
            return not 1 <= error.retry_delay_s <= 60
        return True

    for most, lasts_s in ((32, 10), (16, 20), (8, 40), (4, 60), (2, 60), (1, 60), (1, 60)):
        memory.limit("slow")
        assert can_have(most)
        assert not can_have(most + 1)
        memory.free(memory.allocate(units(64), "other", deadline=0))
        now += lasts_s - 0.125
        assert not can_have(most + 1)
        now += 0.25
        assert can_have(64)
    now += 60
    memory.limit("slow")
    assert can_have(32)


def test_clients_that_lost_transfers_leave_a_share_to_another() -> None:
    memory = Allocator(units(64))
    for name in "abc":
        memory.limit(name)
    for name in "abc":
        memory.allocate(units(16), name, deadline=0)
        with pytest.raises(OverloadedError, match=r"may have \d+ bytes of 16384"):
            memory.allocate_at_once(units(1), name)
    memory.allocate(units(16), "other", deadline=0)


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that requests that wait go on only if they are told to."""
    monkeypatch.setattr(allocator, "_CHECK_INTERVAL_S", 10 * TIMEOUT_S)


@pytest.mark.usefixtures("no_checks")
def test_memory_that_comes_back_goes_to_all_requests_that_it_is_enough_for() -> None:
    memory = Allocator(units(8))
    held = memory.allocate(units(8), "before")
    crowd = Crowd(memory)
    futures = [crowd.ask(name, 2) for name in "abcd"]
    memory.free(held)
    assert {future.result(TIMEOUT_S).client for future in futures} == set("abcd")


@pytest.mark.usefixtures("no_checks")
def test_a_request_that_is_refused_while_it_waits_makes_way_for_the_next_one() -> None:
    memory = Allocator(units(64))
    memory.allocate(units(40), "before")
    crowd = Crowd(memory)
    large = crowd.ask("slow", 60)
    while (small := crowd.ask("small", 20)).done():  # until they have passed it for long enough
        memory.free(small.result())
    memory.limit("slow")
    assert small.result(TIMEOUT_S)
    assert isinstance(large.exception(TIMEOUT_S), OverloadedError)


@pytest.mark.usefixtures("no_checks")
def test_a_client_that_loses_a_transfer_waits_no_longer_for_more_than_it_may_have() -> None:
    memory = Allocator(units(64))
    held = memory.allocate(units(64), "before")
    crowd = Crowd(memory)
    first, second, third = (crowd.ask(name, 20, "slow") for name in "abc")
    other = crowd.ask("other", 20)
    memory.limit("slow")
    for refused in (second, third):
        assert isinstance(refused.exception(TIMEOUT_S), OverloadedError)
    memory.free(held)
    for future in (first, other):
        memory.free(future.result(TIMEOUT_S))
    assert memory.usage() == ((), {}, {}, memory.nbytes)


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no limit of a client ends."""
    monkeypatch.setattr(lost_transfers, "time", Clock())


@pytest.mark.usefixtures("stopped_clock")
def test_a_client_that_lost_transfers_is_told_when_it_may_have_what_it_asked_for() -> None:
    memory = Allocator(units(64))
    memory.limit("slow")
    memory.allocate(units(30), "slow")
    for count, delay_s in ((10, RETRY_DELAY_S), (40, 10)):
        with pytest.raises(OverloadedError) as refused:
            memory.allocate(units(count), "slow")
        assert refused.value.retry_delay_s == delay_s


@pytest.mark.usefixtures("stopped_clock")
def test_what_a_client_that_lost_transfers_waits_for_counts_too() -> None:
    memory = Allocator(units(64))
    held = memory.allocate(units(64), "other")
    memory.limit("slow")
    waiting = Crowd(memory).ask("slow", 15)
    with pytest.raises(OverloadedError):
        memory.allocate(units(15), "slow")
    memory.free(held)
    assert waiting.result(TIMEOUT_S)


@pytest.mark.usefixtures("stopped_clock")
def test_those_that_have_memory_or_wait_have_even_shares_and_those_that_lost_transfers_less() -> None:
    memory = Allocator(units(64))
    held = memory.allocate(units(20), "slow")
    waiting = Crowd(memory).ask("other", 60)
    assert memory.usage().shares == {"slow": units(32), "other": units(32)}
    memory.limit("slow")
    assert memory.usage().shares == {"slow": units(64) // 3 // 2, "other": units(32)}
    memory.free(held)
    assert waiting.result(TIMEOUT_S)


def test_refusals_leave_no_garbage() -> None:
    memory = Allocator(units(64))
    held = memory.allocate(units(64), "before")

    def lose_a_transfer() -> bool:
        memory.limit("slow")
        return False

    with no_exceptions_left(), suppress(OverloadedError):
        memory.allocate(units(40), "slow", is_cancelled=lose_a_transfer)
        pytest.fail("the client may have no more than half")
    memory.free(held)
    with no_exceptions_left(), suppress(OverloadedError):
        memory.limit("slow")  # again, since the collector may have taken longer than the limit lasts
        memory.allocate(units(40), "slow")
        pytest.fail("the client may have no more than half")


def test_a_bounded_number_of_clients_is_remembered() -> None:
    memory = Allocator(units(64))
    for number in range(1100):
        memory.limit(str(number))
    memory.free(memory.allocate(units(64), "0"))
    with pytest.raises(OverloadedError):
        memory.allocate(units(64), "1099")


def test_nothing_is_taken_at_once_while_others_wait() -> None:
    memory = Allocator(units(4))
    memory.allocate(units(1), "slow")
    Crowd(memory).ask("large", 4)
    assert memory.allocate_at_once(units(1), "quick") is None


@pytest.mark.parametrize(
    ("timeout_s", "is_cancelled", "error"),
    [
        (0.05, False, TimeoutError),
        (-1.0, False, TimeoutError),
        (60.0, True, CancelledError),
        (None, True, CancelledError),
    ],
)
def test_waiting_for_memory_ends_at_the_deadline_or_when_cancelled_and_leaves_no_trace(
    timeout_s: float | None, is_cancelled: bool, error: type[Exception]
) -> None:
    memory = Allocator(units(2))
    held = memory.allocate(ALIGNMENT + 1, "a")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with pytest.raises(error):
        memory.allocate(1, "a", deadline, lambda: is_cancelled)
    assert is_cancelled or (deadline is not None and time.monotonic() >= deadline)
    memory.free(held)
    assert memory.allocate(memory.nbytes, "a", deadline=0) == held
    assert not memory.is_waited_for


def test_a_request_that_gives_up_makes_way_for_the_next_one() -> None:
    memory = Allocator(units(2))
    memory.allocate(units(1), "slow")
    gone = threading.Event()
    crowd = Crowd(memory)
    is_gone: Callable[[], bool] = gone.is_set
    with ThreadPoolExecutor(1) as thread:
        large = thread.submit(memory.allocate, units(2), "large", None, is_gone)
        while not memory.is_waited_for:
            time.sleep(0.001)
        first, second = crowd.ask("small", 1), crowd.ask("small", 1)
        memory.free(first.result(TIMEOUT_S))
        memory.free(second.result(TIMEOUT_S))
        while (third := crowd.ask("small", 1)).done():  # until they have passed it for long enough
            memory.free(third.result())
        gone.set()
        assert isinstance(large.exception(TIMEOUT_S), CancelledError)
    third.result(TIMEOUT_S)


def test_memory_that_comes_while_a_request_is_cancelled_is_given_back() -> None:
    memory = Allocator(units(2))
    held = memory.allocate(units(2), "a")

    def is_cancelled() -> bool:
        memory.free(held)
        return True

    with pytest.raises(CancelledError):
        memory.allocate(units(1), "b", is_cancelled=is_cancelled)
    assert memory.usage() == ((), {}, {}, memory.nbytes)


def test_free_memory_is_taken_even_after_the_deadline() -> None:
    memory = Allocator(ALIGNMENT)
    assert memory.allocate(1, "a", deadline=0, is_cancelled=lambda: True) == Block(0, ALIGNMENT, "a")


def test_who_comes_last_does_not_pass_those_that_have_waited_for_their_turns() -> None:
    memory = Allocator(units(4))
    crowd = Crowd(memory)
    held = memory.allocate(units(4), "before")
    futures = [crowd.ask("first", 4) for _ in range(4)]
    for number in range(4):
        held = hand_on(memory, held, futures)
        if number == 1:
            futures.append(crowd.ask("late", 4))
    assert crowd.order == ["first", "first", "first", "late"]
    memory.free(held)
    memory.free(futures[0].result(TIMEOUT_S))


def test_a_client_that_lost_transfers_has_no_spare_memory_for_some_time() -> None:
    memory = Allocator(units(64))
    memory.limit("slow")
    assert memory.allocate_spare(units(1), "slow") is None
    assert memory.allocate_spare(units(1), "other") == Block(units(32), units(1), "other")


def test_nothing_is_spare_while_others_wait() -> None:
    memory = Allocator(units(4))
    memory.allocate(units(1), "slow")
    Crowd(memory).ask("large", 4)
    assert memory.allocate_spare(units(1), "quick") is None
