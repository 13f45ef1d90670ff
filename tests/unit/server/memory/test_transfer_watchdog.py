"""Which transfers are ended, and which are left alone; each runs on a thread that counts what moves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import pytest
from tests.clock import Clock
from tests.garbage import no_exceptions_left
from tests.servers import wait_until

from bngrad_server.errors import OverloadedError
from bngrad_server.memory import allocator, transfer_watchdog
from bngrad_server.memory.allocator import Allocator, Block, Usage
from bngrad_server.memory.transfer_watchdog import TransferWatchdog
from bngrad_server.rpc_context import RpcContext

pytestmark = pytest.mark.slow

MIB = 2**20
TIMEOUT_S, WINDOW_S = 30.0, 1.5


class Traffic:
    """A client's bytes, which come at a rate, until the call is interrupted."""

    def __init__(self, nbytes_per_s: float) -> None:
        self._began = time.monotonic()
        self._rate = nbytes_per_s
        self.interrupted = threading.Event()

    @property
    def moved(self) -> int:
        return int((time.monotonic() - self._began) * self._rate)

    def interrupt(self) -> None:
        self.interrupted.set()

    def resume(self) -> None:
        self.interrupted.clear()


class Transfers:
    """Transfers of clients, which hold memory for as long as they take."""

    def __init__(self) -> None:
        self.memory = Allocator(100 * MIB)
        self.watchdog = TransferWatchdog(TIMEOUT_S, (self.memory,), limits_clients=True)
        self.threads = ThreadPoolExecutor(16)

    def begin(
        self, client: str, nbytes: int, rate: float, held: int | None = None, deadline: float | None = None
    ) -> Callable[[], type[Exception] | None]:
        """Begins a transfer; returns what waits for its end and returns the class of its error."""
        traffic = Traffic(rate)
        rpc = RpcContext(client, deadline, lambda: False, traffic.interrupt, {}, traffic=traffic)
        block = self.memory.allocate(held or nbytes, client, deadline=0)

        def transfer() -> None:
            try:
                with self.watchdog.upload(nbytes, rpc, self.memory, block):
                    while traffic.moved < nbytes and not traffic.interrupted.wait(0.01):
                        pass
            finally:
                self.memory.free(block)

        future = self.threads.submit(transfer)

        def outcome() -> type[Exception] | None:
            error = future.exception(TIMEOUT_S)
            assert error is None or isinstance(error, Exception)
            return None if error is None else type(error)

        return outcome


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfers]:
    monkeypatch.setattr(transfer_watchdog, "_WINDOW_S", WINDOW_S)
    transfers = Transfers()
    yield transfers
    transfers.watchdog.close()


class Call:
    """A call whose bytes a test counts, and how it was ended: by "interrupt", by "abort", or not."""

    def __init__(self, client: str = "slow", deadline: float | None = None) -> None:
        self.moved = 0
        self.ended_by = ""
        self.rpc = RpcContext(client, deadline, lambda: False, lambda: self._end("abort"), {}, traffic=self)

    def interrupt(self) -> None:
        self._end("interrupt")

    def resume(self) -> None:
        self.ended_by = ""

    def _end(self, how: str) -> None:
        self.ended_by = how


class Steps:
    """A watchdog that looks when a test has it look, and whose clock the test sets."""

    def __init__(self, clock: Clock, *, timeout_s: float = TIMEOUT_S, limits_clients: bool = True) -> None:
        self.clock = clock
        self.memory, self.other_memory = Allocator(100 * MIB), Allocator(100 * MIB)
        memories = self.memory, self.other_memory
        self.watchdog = TransferWatchdog(timeout_s, memories, limits_clients=limits_clients)
        self.watchdog.close()

    def upload(self, call: Call, nbytes: int, *, is_spare: bool = False) -> AbstractContextManager[None]:
        block = self.memory.allocate(nbytes, call.rpc.client, deadline=0)
        return self.watchdog.upload(nbytes, call.rpc, self.memory, block, is_spare=is_spare)

    def look_after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.watchdog._look()

    @contextmanager
    def waiting(self, client: str, nbytes: int) -> Iterator[None]:
        """Has a client wait for memory."""
        ended = threading.Event()

        def wait() -> None:
            with suppress(CancelledError):
                self.memory.allocate(nbytes, client, None, ended.is_set)

        waiter = threading.Thread(target=wait)
        waiter.start()
        try:
            wait_until(lambda: self.memory.is_waited_for)
            yield
        finally:
            ended.set()
            waiter.join()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(transfer_watchdog, "time", clock)
    monkeypatch.setattr(transfer_watchdog, "_WINDOW_S", WINDOW_S)
    monkeypatch.setattr(allocator, "_CHECK_INTERVAL_S", 0.01)
    return clock


@pytest.fixture
def steps(clock: Clock) -> Steps:
    return Steps(clock)


@pytest.mark.parametrize(
    ("steps_of", "is_over"),
    [
        ([(0.1, 50 * MIB), (1.4, 0)], False),
        ([(0.1, 50 * MIB), (1.6, 0)], True),
        ([(1.2, 2**16), (1.2, 2**16), (1.2, 2**16)], True),
        ([(1.2, 2**18), (1.2, 2**18), (1.2, 2**18), (1.2, 2**18)], False),
    ],
    ids=["pauses", "stands still", "is too slow", "is fast enough"],
)
def test_a_transfer_has_to_move_on_whatever_its_connection_has_moved_before(
    steps: Steps, steps_of: list[tuple[float, int]], is_over: bool
) -> None:
    call = Call()
    call.moved = 100 * MIB
    steps.upload(call, 90 * MIB).__enter__()
    for seconds, nbytes in steps_of:
        call.moved += nbytes
        steps.look_after(seconds)
    assert bool(call.ended_by) is is_over


@pytest.mark.parametrize("rate", [0, 2**15])
def test_what_moves_less_than_the_least_rate_is_ended(transfers: Transfers, rate: int) -> None:
    assert transfers.begin("slow", MIB, rate)() is OverloadedError


def test_a_transfer_that_is_ended_leaves_no_garbage(transfers: Transfers) -> None:
    traffic = Traffic(0)
    rpc = RpcContext("slow", None, lambda: False, traffic.interrupt, {}, traffic=traffic)
    block = transfers.memory.allocate(MIB, "slow", deadline=0)
    with no_exceptions_left():
        with suppress(OverloadedError), transfers.watchdog.upload(MIB, rpc, transfers.memory, block):
            assert traffic.interrupted.wait(TIMEOUT_S)
        transfers.watchdog.close()  # its thread no longer looks at the transfer


@pytest.mark.parametrize("drains", ["before", "during"])
@pytest.mark.parametrize("error", [None, TimeoutError("interrupted"), KeyboardInterrupt()])
def test_a_wait_for_a_request_ends_with_the_server_unless_there_is_one(
    transfers: Transfers, drains: str, error: BaseException | None
) -> None:
    traffic = Traffic(0)
    rpc = RpcContext("client", None, lambda: False, traffic.interrupt, {}, traffic=traffic)
    expected: type[BaseException] = CancelledError if isinstance(error, Exception) else KeyboardInterrupt
    if drains == "before":
        transfers.watchdog.drain()
    with ExitStack() as stack:
        if error is not None:
            stack.enter_context(pytest.raises(expected))
        with transfers.watchdog.awaits_request(rpc):
            if drains == "during":
                assert not traffic.interrupted.is_set()
                transfers.watchdog.drain()
            assert traffic.interrupted.is_set()
            if error is not None:
                raise error
    assert not traffic.interrupted.is_set()  # what follows can be received


def test_a_wait_for_a_request_that_failed_by_itself_says_why(transfers: Transfers) -> None:
    traffic = Traffic(0)
    rpc = RpcContext("client", None, lambda: False, traffic.interrupt, {}, traffic=traffic)
    with pytest.raises(ConnectionError), transfers.watchdog.awaits_request(rpc):
        raise ConnectionError
    transfers.watchdog.drain()
    assert not traffic.interrupted.is_set()


def test_a_wait_for_a_request_is_ended_once_after_the_timeout(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    transfers.watchdog.close()  # the test looks itself
    clock = Clock()
    monkeypatch.setattr(transfer_watchdog, "time", clock)
    traffic = Traffic(0)
    rpc = RpcContext("client", None, lambda: False, traffic.interrupt, {}, traffic=traffic)
    with transfers.watchdog.awaits_request(rpc):
        for seconds, is_over in [(TIMEOUT_S - 1, False), (2, True), (2, True)]:
            clock.now += seconds
            transfers.watchdog._look()
            assert traffic.interrupted.is_set() is is_over
    assert len([record for record in caplog.records if "ending a call" in record.message]) == 1


def test_a_server_that_stops_ends_no_other_wait(transfers: Transfers) -> None:
    transfers.watchdog.close()  # on a busy machine it might end the upload
    traffic = Traffic(0)
    rpc = RpcContext("client", None, lambda: False, traffic.interrupt, {}, traffic=traffic)
    block = transfers.memory.allocate(MIB, "client", deadline=0)
    with transfers.watchdog.watched(0, rpc), transfers.watchdog.upload(MIB, rpc, transfers.memory, block):
        transfers.watchdog.drain()
        assert not traffic.interrupted.is_set()


@pytest.mark.parametrize("error", [MemoryError, KeyError])
def test_the_watchdog_goes_on_after_looks_that_failed(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    looks = 0

    def check(*arguments: Any) -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise error
        _check(transfers.watchdog, *arguments)

    _check = TransferWatchdog._check
    monkeypatch.setattr(transfers.watchdog, "_check", check)
    assert transfers.begin("slow", MIB, 0)() is OverloadedError


def test_what_moves_at_the_least_rate_is_left_alone(transfers: Transfers) -> None:
    assert transfers.begin("slow", 2**19, 2**17 * 1.1)() is None


def test_the_deadline_of_the_call_ends_a_transfer(transfers: Transfers) -> None:
    assert transfers.begin("slow", 100 * MIB, MIB, deadline=time.monotonic() - 0.5)() is TimeoutError


@pytest.mark.parametrize("wanted", [10 * MIB, 40 * MIB, 100 * MIB])
def test_slow_transfers_of_the_largest_client_make_room_for_those_that_wait(transfers: Transfers, wanted: int) -> None:
    large = transfers.begin("greedy", 95 * MIB, MIB)
    begin = time.monotonic()
    transfers.memory.allocate(wanted, "waiting", begin + TIMEOUT_S)
    assert time.monotonic() - begin < TIMEOUT_S / 2
    assert large() is OverloadedError


def test_a_client_whose_transfer_was_ended_cannot_take_all_memory_again(transfers: Transfers) -> None:
    large = transfers.begin("greedy", 100 * MIB, MIB)
    transfers.memory.free(transfers.memory.allocate(100 * MIB, "waiting", time.monotonic() + TIMEOUT_S))
    assert large() is OverloadedError
    with pytest.raises(OverloadedError):
        transfers.memory.allocate(60 * MIB, "greedy")
    half = transfers.begin("greedy", 50 * MIB, MIB)
    transfers.memory.free(transfers.memory.allocate(40 * MIB, "waiting", deadline=0))
    transfers.memory.allocate(60 * MIB, "whole", time.monotonic() + TIMEOUT_S)  # it keeps less than it may have
    assert half() is OverloadedError


@pytest.mark.parametrize("rate", [0, 1])
def test_a_transfer_without_its_first_bytes_makes_room_soon(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch, rate: int
) -> None:
    monkeypatch.setattr(transfer_watchdog, "_RATE_INTERVAL_S", TIMEOUT_S)
    monkeypatch.setattr(transfer_watchdog, "_WINDOW_S", TIMEOUT_S)
    nothing = transfers.begin("greedy", 100 * MIB, rate)
    transfers.memory.allocate(40 * MIB, "waiting", time.monotonic() + TIMEOUT_S / 2)
    assert nothing() is OverloadedError


def test_no_more_is_ended_than_is_needed(transfers: Transfers) -> None:
    slow = [transfers.begin("greedy", 19 * MIB, 4 * MIB) for _ in range(5)]
    transfers.memory.allocate(10 * MIB, "waiting", time.monotonic() + TIMEOUT_S)
    assert sorted(str(outcome()) for outcome in slow).count("None") == 4


def test_no_other_is_ended_while_enough_memory_is_about_to_become_free(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers.watchdog.close()  # the test looks itself
    clock = Clock()
    monkeypatch.setattr(transfer_watchdog, "time", clock)
    calls = [Traffic(0) for _ in range(4)]
    for traffic in calls:
        rpc = RpcContext("greedy", None, lambda: False, traffic.interrupt, {}, traffic=traffic)
        block = transfers.memory.allocate(24 * MIB, "greedy", deadline=0)
        transfers.watchdog.upload(24 * MIB, rpc, transfers.memory, block).__enter__()
    ended = threading.Event()
    transfers.threads.submit(transfers.memory.allocate, 10 * MIB, "waiting", None, ended.is_set)
    while not transfers.memory.is_waited_for:
        time.sleep(0.001)
    clock.now += 0.6
    for _ in range(3):
        transfers.watchdog._look()
    ended.set()
    assert sum(traffic.interrupted.is_set() for traffic in calls) == 1


def test_what_ends_soon_is_left_alone(transfers: Transfers) -> None:
    quick = transfers.begin("greedy", 90 * MIB, 50 * MIB)
    transfers.memory.allocate(50 * MIB, "waiting", time.monotonic() + TIMEOUT_S)
    assert quick() is None


def test_a_client_with_no_more_than_its_share_is_left_alone(transfers: Transfers) -> None:
    modest = transfers.begin("modest", 45 * MIB, 8 * MIB)
    begin = time.monotonic()
    transfers.memory.allocate(100 * MIB, "waiting", begin + TIMEOUT_S)
    assert modest() is None


def test_a_client_that_waits_for_its_own_transfers_ends_none(transfers: Transfers) -> None:
    own = transfers.begin("greedy", 60 * MIB, 20 * MIB)
    transfers.memory.allocate(60 * MIB, "greedy", time.monotonic() + TIMEOUT_S)
    assert own() is None


def test_more_traffic_than_a_transfer_has_is_no_progress(transfers: Transfers) -> None:
    """Such as frames that carry nothing."""
    traffic = Traffic(50 * MIB)
    rpc = RpcContext("busy", None, lambda: False, traffic.interrupt, {}, traffic=traffic)
    block = transfers.memory.allocate(MIB, "busy")
    with (
        pytest.raises(OverloadedError),
        transfers.watchdog.upload(MIB, rpc, transfers.memory, block),
    ):
        assert traffic.interrupted.wait(TIMEOUT_S)


def test_a_client_whose_deadline_passed_may_have_as_much_again(transfers: Transfers) -> None:
    assert transfers.begin("hasty", 100 * MIB, MIB, deadline=time.monotonic() - 0.5)() is TimeoutError
    transfers.memory.free(transfers.memory.allocate(100 * MIB, "other", deadline=0))
    block = transfers.memory.allocate(10 * MIB, "other", deadline=0)
    transfers.memory.free(transfers.memory.allocate(80 * MIB, "hasty", deadline=0))
    transfers.memory.free(block)


@pytest.mark.parametrize(
    ("begin", "ended_by"),
    [
        (lambda steps, call: steps.upload(call, 2**20), "interrupt"),
        (lambda steps, call: steps.watchdog.download(2**20, call.rpc, steps.memory, Block(0, 0, "slow")), "abort"),
        (lambda steps, call: steps.watchdog.awaits_request(call.rpc), "abort"),
        (lambda steps, call: steps.watchdog.watched(0, call.rpc), "abort"),
    ],
    ids=["upload", "download", "awaits_request", "watched"],
)
def test_what_receives_a_tensor_is_interrupted_and_any_other_call_aborted_after_its_deadline_and_a_second(
    steps: Steps, begin: Callable[[Steps, Call], AbstractContextManager[None]], ended_by: str
) -> None:
    call = Call(deadline=steps.clock.now + 0.5)
    begin(steps, call).__enter__()
    steps.look_after(1.4)
    assert not call.ended_by
    steps.look_after(0.2)
    assert call.ended_by == ended_by


def test_what_is_watched_has_a_second_more_for_each_megabit(steps: Steps) -> None:
    call = Call()
    steps.watchdog.watched(10 * 2**17, call.rpc).__enter__()
    steps.look_after(TIMEOUT_S + 9)
    assert not call.ended_by
    steps.look_after(2)
    assert call.ended_by


def test_a_transfer_may_stand_still_for_the_timeout_where_that_is_shorter(clock: Clock) -> None:
    steps = Steps(clock, timeout_s=WINDOW_S / 2)
    call = Call()
    steps.upload(call, MIB).__enter__()
    steps.look_after(WINDOW_S / 2 - 0.1)
    assert not call.ended_by
    steps.look_after(0.2)
    assert call.ended_by
    steps.watchdog.close()


@pytest.mark.parametrize(("looks", "is_ended"), [(1, False), (8, True)])
def test_no_transfer_is_ended_for_a_time_in_which_the_server_itself_was_stopped(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, looks: int, is_ended: bool
) -> None:
    waits_s = [0.25, 60.0, *looks * [0.25]]

    class Closing:
        def wait(self, timeout_s: float) -> bool:
            if not waits_s:
                return True
            steps.clock.now += waits_s.pop(0)
            return False

    monkeypatch.setattr(steps.watchdog, "_closing", Closing())
    call = Call()
    steps.upload(call, MIB).__enter__()
    steps.watchdog._run()
    assert bool(call.ended_by) is is_ended


def test_after_an_upload_that_was_ended_its_connection_can_receive_again(steps: Steps) -> None:
    call = Call()
    with pytest.raises(OverloadedError), steps.upload(call, MIB):
        steps.look_after(WINDOW_S)
    assert not call.ended_by


def test_a_transfer_that_has_ended_meanwhile_is_not_interrupted(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call()
    upload = steps.upload(call, MIB)
    upload.__enter__()
    check = steps.watchdog._check

    def end_and_check(*arguments: Any) -> None:
        upload.__exit__(None, None, None)
        check(*arguments)

    monkeypatch.setattr(steps.watchdog, "_check", end_and_check)
    steps.look_after(WINDOW_S)
    assert not call.ended_by  # the next call of its connection would fail


@pytest.mark.parametrize(("waiting", "is_spare"), [("slow", True), ("other", False)])
def test_the_watchdog_survives_a_transfer_that_ends_and_frees_its_memory_while_it_looks(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, waiting: str, is_spare: bool
) -> None:
    steps.memory.allocate(80 * MIB, "busy")
    block = steps.memory.allocate(10 * MIB, "slow")
    upload = steps.watchdog.upload(10 * MIB, Call().rpc, steps.memory, block, is_spare=is_spare)
    upload.__enter__()
    usage = steps.memory.usage

    def end_and_return_usage() -> Usage:
        upload.__exit__(None, None, None)
        steps.memory.free(block)
        return usage()

    with steps.waiting(waiting, 40 * MIB):
        monkeypatch.setattr(steps.memory, "usage", end_and_return_usage)
        steps.look_after(0.6)


def test_a_transfer_that_was_fast_a_second_ago_is_not_slow_yet(steps: Steps) -> None:
    call = Call()
    steps.upload(call, 90 * MIB).__enter__()
    with steps.waiting("other", 40 * MIB):
        call.moved = 50 * MIB
        steps.look_after(1)
        steps.look_after(1)
        assert not call.ended_by


@pytest.mark.parametrize("is_spare", [False, True])
def test_a_spare_transfer_makes_room_also_for_a_client_that_has_as_much(steps: Steps, is_spare: bool) -> None:
    call = Call()
    steps.upload(call, 40 * MIB, is_spare=is_spare).__enter__()
    with steps.waiting("other", 80 * MIB):
        steps.look_after(0.6)
        assert bool(call.ended_by) is is_spare


def test_transfers_that_hold_other_memory_are_left_alone(steps: Steps) -> None:
    call = Call("greedy")
    steps.memory.allocate(95 * MIB, "greedy")
    block = steps.other_memory.allocate(50 * MIB, "greedy")
    steps.watchdog.upload(50 * MIB, call.rpc, steps.other_memory, block).__enter__()
    with steps.waiting("other", 40 * MIB):
        steps.look_after(0.6)
        assert not call.ended_by


@pytest.mark.parametrize("limits_clients", [False, True])
def test_only_known_clients_are_limited_for_what_they_lost(clock: Clock, limits_clients: bool) -> None:
    steps, call = Steps(clock, limits_clients=limits_clients), Call()
    with pytest.raises(OverloadedError), steps.upload(call, 10 * MIB):
        steps.look_after(WINDOW_S)
    limited = pytest.raises(OverloadedError, match="others needed memory that this client held")
    with limited if limits_clients else nullcontext():
        steps.memory.allocate(90 * MIB, "slow", deadline=0)


@pytest.mark.parametrize(("wanted", "n_ended"), [(50 * MIB, 2), (90 * MIB, 3)], ids=["enough", "up to its share"])
def test_the_slowest_of_a_client_are_ended_until_enough_is_free_or_it_has_its_share(
    steps: Steps, wanted: int, n_ended: int
) -> None:
    steps.memory.allocate(MIB, "third")
    calls = [Call("greedy") for _ in range(6)]
    for call in calls:
        steps.upload(call, 10 * MIB).__enter__()
    with steps.waiting("other", wanted):
        for number, call in enumerate(calls):
            call.moved = number * MIB
        steps.look_after(1)
        assert [bool(call.ended_by) for call in calls] == [number < n_ended for number in range(6)]


def test_a_client_that_has_its_share_and_waits_for_more_ends_none_of_its_own(steps: Steps) -> None:
    steps.memory.allocate(MIB, "other")
    call = Call("greedy")
    steps.upload(call, 60 * MIB).__enter__()
    with steps.waiting("greedy", 60 * MIB):
        steps.look_after(1)
        assert not call.ended_by
