from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
from tests.unit.server.workers.additions import wait_until

from bngrad_server.errors import OverloadedError
from bngrad_server.rpc.fair_shares import FairShares


class Rpc:
    """What FairShares needs of grpcio's context of a call."""

    def __init__(self) -> None:
        self.is_over = False
        self._callbacks: list[Callable[[], object]] = []

    def add_callback(self, callback: Callable[[], object]) -> bool:
        self._callbacks.append(callback)
        return not self.is_over

    def is_active(self) -> bool:
        return not self.is_over

    def end(self) -> None:
        self.is_over = True
        for callback in self._callbacks:
            callback()


class Calls:
    """Calls that take parts, each in a thread where it must wait."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._threads = ThreadPoolExecutor()
        self._waiting: list[Any] = []

    def take(self, client: str, amount: int = 1, rpc: Any = None) -> AbstractContextManager[None]:
        context: Any = rpc or Rpc()
        return self._shares.part(client, amount, context, timeout_s=0)

    def wait(self, client: str, amount: int = 1, rpc: Any = None) -> Future[AbstractContextManager[None]]:
        """Takes a part in a thread, and returns once the call waits."""
        begun = threading.Event()
        rpc = rpc or Rpc()
        original = rpc.add_callback

        def add_callback(callback: Callable[[], object]) -> bool:
            begun.set()
            return bool(original(callback))

        rpc.add_callback = add_callback
        self._waiting.append(rpc)
        future = self._threads.submit(self._shares.part, client, amount, rpc)
        wait_until(begun.is_set)
        return future

    def end(self) -> None:
        """Ends the calls that still wait, and with them their threads."""
        for rpc in self._waiting:
            rpc.end()
        self._threads.shutdown()

    def share(self, client: str) -> int:
        """Returns how much a client gets, and keeps it."""
        number = 0
        try:
            while True:
                self.take(client)
                number += 1
        except OverloadedError:
            return number


@pytest.fixture
def calls() -> Iterator[Calls]:
    calls = Calls(FairShares("places", 64, max_waiting=3))
    yield calls
    calls.end()


@pytest.fixture
def ten() -> Iterator[Calls]:
    calls = Calls(FairShares("bytes", 10))
    yield calls
    calls.end()


def test_each_client_leaves_room_for_another(calls: Calls) -> None:
    shares = [calls.share(f"client {i}") for i in range(5)]
    assert shares == [42, 14, 5, 2, 1]


def test_a_client_that_has_given_back_all_has_its_whole_share_again_and_is_forgotten() -> None:
    shares = FairShares("places", 64)
    calls = Calls(shares)
    for _ in range(2):
        held = [calls.take("client") for _ in range(42)]
        with pytest.raises(OverloadedError):
            calls.take("client")
        for part in held:
            part.__exit__(None, None, None)
    assert not shares._taken


def test_what_is_given_back_goes_to_the_client_that_has_least(calls: Calls) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(calls.take("many")) for _ in range(42)]
        others = [calls.take(f"client {i}") for i in range(22)]
        more, few = calls.wait("many"), calls.wait("few")
        others.pop().__exit__(None, None, None)
        assert few.result(10)
        assert not more.done()
        assert held
    assert more.result(10)


def test_calls_of_a_client_are_served_in_their_order(ten: Calls) -> None:
    """The small one waits although there is room for it."""
    first = ten.take("client", 4)
    large, small = ten.wait("client", 6), ten.wait("client", 1)
    first.__exit__(None, None, None)
    large.result(10).__exit__(None, None, None)
    assert small.result(10)


def test_the_next_call_of_a_client_is_served_when_the_one_before_it_ends(ten: Calls) -> None:
    first, rpc = ten.take("client", 4), Rpc()
    large, small = ten.wait("client", 6, rpc), ten.wait("client", 1)
    rpc.end()
    assert small.result(10)
    with pytest.raises(CancelledError):
        large.result(10)
    assert first


def test_of_the_clients_whose_calls_fit_the_one_that_has_least_is_served(calls: Calls) -> None:
    held = [calls.take(client, amount) for client, amount in (("more", 3), ("less", 1), ("others", 55))]
    last = calls.take("last", 4)
    too_large, more, less = calls.wait("none", 30), calls.wait("more", 2), calls.wait("less", 2)
    last.__exit__(None, None, None)
    assert less.result(10)
    assert not more.done()
    assert not too_large.done()
    assert held


def test_more_than_there_is_is_given_to_one_at_a_time(ten: Calls) -> None:
    first = ten.take("client", 100)
    waiting = ten.wait("other", 1)
    assert not waiting.done()
    first.__exit__(None, None, None)
    assert waiting.result(10)


def test_who_may_have_nothing_now_waits_until_it_may() -> None:
    full = {"full"}
    shares = FairShares("places", 64, is_worthwhile=lambda client: client not in full)
    calls = Calls(shares)
    with pytest.raises(OverloadedError, match="share of the places"):
        calls.take("full")
    waiting = calls.wait("full")
    assert calls.take("other")
    assert not waiting.done()
    full.clear()
    shares.serve()
    assert waiting.result(10)
    calls.end()


def test_beyond_those_that_may_wait_the_latest_of_the_client_with_most_is_refused(calls: Calls) -> None:
    calls.share("greedy")
    with ExitStack() as stack:
        for i in range(22):
            stack.enter_context(calls.take(f"client {i}"))
        first, second, third = (calls.wait("greedy") for _ in range(3))
        good = calls.wait("good")
        with pytest.raises(OverloadedError, match="share of the places") as refused:
            third.result(10)
        assert refused.value.retry_delay_s == 1
    assert good.result(10)
    assert not first.done()
    assert not second.done()


def test_a_refused_call_gets_no_part_that_is_free_before_its_thread_goes_on(calls: Calls) -> None:
    held = [calls.take("greedy") for _ in range(42)] + [calls.take(f"client {i}") for i in range(22)]
    goes_on, slow = threading.Event(), Rpc()
    add_callback = slow.add_callback
    slow.add_callback = lambda callback: goes_on.wait(10) and add_callback(callback)  # type: ignore[method-assign]
    waiting = [calls.wait("greedy"), calls.wait("greedy")]
    refused = calls.wait("greedy", rpc=slow)
    waiting.append(calls.wait("good"))
    for part in held:
        part.__exit__(None, None, None)
    goes_on.set()
    with pytest.raises(OverloadedError):
        refused.result(10)
    assert all(call.result(10) for call in waiting)


def test_a_call_that_ends_leaves_the_queue(calls: Calls) -> None:
    calls.share("client")
    rpc = Rpc()
    waiting = calls.wait("client", rpc=rpc)
    rpc.end()
    with pytest.raises(CancelledError):
        waiting.result(10)
    with pytest.raises(CancelledError):
        calls.wait("client", rpc=rpc).result(10)


@pytest.mark.parametrize("is_served", [False, True])
def test_a_call_for_whose_wait_there_is_no_memory_leaves_the_queue_and_keeps_no_part(
    calls: Calls, is_served: bool
) -> None:
    held = [calls.take("client") for _ in range(42)]
    rpc = Rpc()

    def add_callback(callback: Callable[[], object]) -> bool:
        if is_served:
            held.pop().__exit__(None, None, None)
        raise MemoryError

    rpc.add_callback = add_callback  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        calls.take("client", rpc=rpc)
    if not is_served:
        held.pop().__exit__(None, None, None)
    assert calls.share("client") == 1
