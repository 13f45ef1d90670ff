"""Servers that come and go while calls are made, against peers over real sockets."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import grpc
import pytest
from tests.clock import Clock
from tests.servers import wait_until
from tests.unit.client.calls import SECONDS, ClientClass, inputs, interrupt_at, no_thread
from tests.unit.client.endpoints import full_listener
from tests.unit.client.peer import echo, peer

import bngrad
import bngrad.aio
from bngrad._balancing import load_balancer, resolver, subset, upstream
from bngrad._balancing.load_balancer import LoadBalancer
from bngrad._balancing.upstream import Selector, Upstream
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import NotSharedError
from bngrad._local.kernels import LocalKernels
from bngrad._results import Device, ServerInfo
from bngrad._transports.selector import TransportSelector
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.load_report import LoadReport


class Fleet:
    """Servers that count their calls.

    Attributes:
        calls: How many calls came to each, by its number.
        down: The numbers of those that refuse every call.
    """

    def __init__(self, targets: list[str], calls: Counter[int], down: set[int]) -> None:
        self.targets = targets
        self.calls = calls
        self.down = down

    def get_calls(self, *numbers: int) -> bool:
        """Returns whether these servers, and no others, got calls since this was last asked."""
        got = set(self.calls)
        self.calls.clear()
        return got == set(numbers)


@contextmanager
def fleet(size: int) -> Iterator[Fleet]:
    calls: Counter[int] = Counter()
    down: set[int] = set()

    def answer_as(number: int) -> Callable[[str, bytes, grpc.ServicerContext], bytes]:
        def answer(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
            if number in down:
                return context.abort(grpc.StatusCode.UNAVAILABLE, "for a test")
            calls[number] += method != "ServerInfo"
            return echo(method, request, context)

        return answer

    with ExitStack() as stack:
        yield Fleet([stack.enter_context(peer(answer_as(number))) for number in range(size)], calls, down)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_LONGEST_INTERVAL_S", 0.05)


@contextmanager
def calls_of(client_class: ClientClass, target: Callable[[], list[str]]) -> Iterator[Callable[[], None]]:
    """Gives what makes 20 calls by a client of either class."""
    made = client_class(target)
    if isinstance(made, bngrad.Client):
        with made as client, ThreadPoolExecutor(4) as threads:

            def call_in_threads() -> None:
                for answer in [threads.submit(client.fused_batch_norm_grad_v2, *inputs(1)) for _ in range(20)]:
                    answer.result(SECONDS)

            yield call_in_threads
    else:
        asynchronous = made

        async def call_in_tasks() -> None:
            await asyncio.gather(*(asynchronous.fused_batch_norm_grad_v2(*inputs(1)) for _ in range(20)))

        yield lambda: asyncio.run(call_in_tasks())
        asyncio.run(asynchronous.close())


def test_a_function_names_the_servers_anew_while_calls_go_on(client_class: ClientClass) -> None:
    with fleet(3) as served:
        targets = served.targets[:2]
        with calls_of(client_class, lambda: targets) as call:

            def reach(*numbers: int) -> bool:
                call()
                return served.get_calls(*numbers)

            wait_until(lambda: reach(0, 1))
            targets[:] = served.targets
            wait_until(lambda: reach(0, 1, 2))
            targets[:] = served.targets[2:]
            wait_until(lambda: reach(2))
            targets.clear()  # the last ones are kept
            for _ in range(5):
                assert reach(2)


def test_the_first_call_says_why_a_function_names_no_server(client_class: ClientClass) -> None:
    def fail() -> list[str]:
        raise RuntimeError("the registry is away")

    with (
        calls_of(client_class, fail) as call,
        pytest.raises(bngrad.UnavailableError, match="function that returns the targets failed: the registry is away"),
    ):
        call()


def test_a_function_is_asked_again_while_a_call_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_LONGEST_INTERVAL_S", 3600.0)
    stopped = threading.Event()

    def stop_after_first(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if stopped.is_set():
            return context.abort(grpc.StatusCode.UNAVAILABLE, "for a test")
        return echo(method, request, context)

    with peer(stop_after_first) as first, peer(echo) as second:
        targets = [first]
        with bngrad.Client(lambda: targets) as client:
            client.fused_batch_norm_grad_v2(*inputs(1))
            targets[:] = [second]
            stopped.set()
            client.fused_batch_norm_grad_v2(*inputs(1))


def test_a_server_that_is_added_before_it_answers_delays_no_call() -> None:
    with fleet(1) as served, full_listener() as listener:
        targets = list(served.targets)
        with bngrad.Client(lambda: targets, timeout=2.0, retries=False) as client:
            client.fused_batch_norm_grad_v2(*inputs(1))
            targets.append("127.0.0.1:{1}".format(*listener.getsockname()))
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                client.fused_batch_norm_grad_v2(*inputs(1))


def test_a_server_that_stands_still_without_a_ready_worker_gets_no_new_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_SILENT_S", 0.0)
    released, held, questions = threading.Event(), Counter[str](), Counter[str]()

    def hold(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if method == "ServerInfo":
            questions["stuck"] += 1
            device = pb.Device(name="cpu", state=pb.WORKER_STATE_STARTING)
            return pb.ServerInfoResponse(devices=[device]).SerializeToString()
        held["stuck"] += 1
        released.wait(SECONDS)
        return echo(method, request, context)

    with (
        peer(hold) as stuck,
        fleet(1) as served,
        bngrad.Client([stuck, *served.targets]) as client,
        ThreadPoolExecutor(12) as threads,
    ):

        def call() -> None:
            while not released.is_set():
                client.fused_batch_norm_grad_v2(*inputs(1))

        calls = [threads.submit(call) for _ in range(4)]
        wait_until(lambda: questions["stuck"] > 3)  # it is asked again and again once it is known not to be ready
        before, served.calls[0] = held["stuck"], 0
        calls += [threads.submit(call) for _ in range(8)]
        wait_until(lambda: served.calls[0] > 300)
        assert held["stuck"] == before
        released.set()
        for each in calls:
            each.result(SECONDS)


def test_a_server_that_failed_counts_as_up_where_no_thread_can_probe_it() -> None:
    with fleet(2) as served, bngrad.Client(served.targets) as client:

        def reach(*numbers: int) -> bool:
            for _ in range(20):
                client.fused_batch_norm_grad_v2(*inputs(1))
            return served.get_calls(*numbers)

        served.down.add(0)
        with no_thread("bngrad-probe"):
            assert reach(1)
        served.down.clear()
        wait_until(lambda: reach(0, 1))


def test_of_a_large_fleet_some_are_used_and_others_when_these_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subset, "SUBSET_SIZE", 4)
    with fleet(12) as served, bngrad.Client(lambda: served.targets) as client:

        def used() -> set[int]:
            served.calls.clear()
            for _ in range(50):
                client.fused_batch_norm_grad_v2(*inputs(1))
            return set(served.calls)

        first = used()
        assert len(first) == 4
        served.down |= first
        wait_until(lambda: len(used()) == 4)
        assert not used() & first
        served.down.clear()
        wait_until(lambda: used() == first)
        served.targets.pop(first.pop())
        wait_until(lambda: used() > first)


def test_a_client_with_more_calls_in_flight_than_its_part_has_servers_uses_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subset, "SUBSET_SIZE", 2)
    with fleet(8) as served, bngrad.Client(served.targets) as client, ThreadPoolExecutor(8) as threads:

        def call(times: int) -> None:
            for _ in range(times):
                client.fused_batch_norm_grad_v2(*inputs(1))

        call(50)
        assert len(served.calls) == 2
        wait_until(lambda: len(served.calls) == 8 or bool(list(threads.map(call, [10] * 8))))


@pytest.mark.parametrize("ended_by", ["itself", "Ctrl-C"])
def test_a_server_that_has_left_is_closed_after_its_last_call(ended_by: str) -> None:
    with fleet(3) as served:
        targets = served.targets[:1]
        with bngrad.Client(lambda: targets) as client:

            def gets_calls(number: int) -> bool:
                client.fused_batch_norm_grad_v2(*inputs(1))
                return served.get_calls(number)

            assert gets_calls(0)
            balancer = client._calls._load_balancer
            use, earlier = balancer.acquire(), balancer.acquire()
            assert use is not None
            assert earlier is not None
            selector = use.server.selector
            targets[:] = served.targets[1:2]
            wait_until(lambda: gets_calls(1))
            balancer.release(earlier)
            assert not has_closed(selector)
            if ended_by == "itself":
                balancer.release(use)
            else:
                del use  # Ctrl-C came before it was released
                targets[:] = served.targets[2:]
                wait_until(lambda: gets_calls(2))
            assert has_closed(selector)
            assert not balancer._leaving


def test_calls_of_a_server_that_has_left_may_go_to_the_one_that_is_left() -> None:
    first, second = "127.0.0.1:1", "127.0.0.1:2"
    targets, has_others = [first], dict[str, Callable[[], bool]]()

    def connect(target: str, hostname: str | None, others: Callable[[], bool]) -> Selector:
        has_others[target] = others
        return LocalKernels()

    def finds(expected: dict[str, bool], now: float = math.inf) -> bool:
        balancer.prepare(Deadline.after(SECONDS), Cancellation(), now)
        return {target: ask() for target, ask in has_others.items()} == expected

    balancer = LoadBalancer(lambda: targets, list, connect)
    assert finds({first: False}, 0.0)
    use = balancer.acquire()
    targets.append(second)
    wait_until(lambda: finds({first: True, second: True}))
    targets.remove(first)
    wait_until(lambda: finds({first: True, second: False}))
    assert use is not None
    balancer.close()


TWO_SERVERS = [resolver.Address("127.0.0.1:1"), resolver.Address("127.0.0.1:2")]


def balancer_of(selectors: Sequence[Selector], used: int | None = None) -> LoadBalancer:
    """Returns the load balancer of a client with these servers, or the first of them, after its first look-up."""
    left = iter(selectors)
    targets = [f"127.0.0.1:{number}" for number in range(1, len(selectors[:used]) + 1)]
    balancer = LoadBalancer(lambda: targets, list, lambda *_: next(left))
    balancer.prepare(Deadline.after(SECONDS), Cancellation(), 0.0)
    return balancer


class Asked(LocalKernels):
    """A server that counts the questions, and answers once it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0
        self.released = threading.Event()

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        self.questions += 1
        self.released.wait(SECONDS)
        return super().server_info(deadline, cancellation)


def test_a_silent_server_is_asked_by_one_thread_and_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, before = Clock(), Asked(), set(threading.enumerate())
    monkeypatch.setattr(upstream, "time", clock)
    balancer, uses = balancer_of([asked, LocalKernels()]), []

    def acquire() -> Upstream:
        use = balancer.acquire(in_order=True)
        assert use is not None
        uses.append(use)
        return use.server

    for seconds in (0.0, 2.0, 2.0):
        clock.now += seconds
        server = acquire()
    balancer.failed(server, bngrad.UnavailableError("for a test"))
    probes = [thread for thread in set(threading.enumerate()) - before if thread.name == "bngrad-probe"]
    assert len(probes) == 1
    asked.released.set()
    wait_until(lambda: server.is_up and not server.is_probed)
    assert not acquire().is_probed
    assert balancer.probe(server)  # as it is known to be
    assert asked.questions == 1
    balancer.close()


class Gone(LocalKernels):
    """A server that is not available until it is back, and counts the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0
        self.is_back = False

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        self.questions += 1
        if not self.is_back:
            raise bngrad.UnavailableError("for a test")
        return super().server_info(deadline, cancellation)


def test_a_thread_that_asks_a_server_again_and_again_keeps_no_client_alive() -> None:
    gone = Gone()
    balancer = balancer_of([gone, LocalKernels()])
    balancer.failed(next(iter(balancer._servers.values())), bngrad.UnavailableError("for a test"))
    wait_until(lambda: gone.questions > 1)
    kept = weakref.ref(balancer)
    del balancer
    wait_until(lambda: gc.collect() >= 0 and kept() is None)


def test_closing_ends_the_thread_that_asks_a_server_again_and_again() -> None:
    gone, before = Gone(), set(threading.enumerate())
    balancer = balancer_of([gone, LocalKernels()])
    balancer.failed(next(iter(balancer._servers.values())), bngrad.UnavailableError("for a test"))
    (probe,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "bngrad-probe")
    wait_until(lambda: gone.questions > 1)
    balancer.close()
    probe.join(SECONDS)
    assert not probe.is_alive()


def test_an_only_server_that_failed_or_is_silent_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(upstream, "time", clock)
    balancer = balancer_of([LocalKernels()])
    (server,) = balancer._servers.values()
    uses = []
    for _ in range(3):
        uses.append(balancer.acquire())
        clock.now += 2.0
    assert server.is_silent
    balancer.failed(server, bngrad.UnavailableError("for a test"))
    assert server.is_up
    assert not server.is_probed
    balancer.close()


@pytest.mark.parametrize(
    ("error", "was_reached"),
    [
        (None, True),
        (bngrad.InvalidArgumentError("wrong"), True),
        (bngrad.UnavailableError("Stream removed"), True),
        (bngrad.UnavailableError("Handshake read failed (Endpoint closing)"), True),
        (bngrad.UnavailableError("gone"), False),
        (NotSharedError("not here"), False),
    ],
    ids=str,
)
def test_a_server_was_reached_that_has_answered_anything(error: bngrad.BngradError | None, was_reached: bool) -> None:
    balancer = balancer_of([Silent()])
    (server,) = balancer._servers.values()
    if error is None:
        balancer.answered(server)
    else:
        balancer.failed(server, error)
    assert balancer.was_reached == was_reached
    balancer.close()


class Silent(LocalKernels):
    """A server that has not told its endpoints."""

    has_answered = False


@pytest.mark.parametrize(
    ("error", "used"), [(bngrad.UnavailableError("gone"), 3), (bngrad.DeadlineExceededError("late"), 2)], ids=str
)
def test_another_server_stands_in_for_one_that_has_gone_until_it_answers(
    error: bngrad.BngradError, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subset, "SUBSET_SIZE", 2)
    selectors = [Asked() for _ in range(4)]
    balancer = balancer_of(selectors)
    before = list(balancer._servers.values())
    balancer.failed(before[0], error)
    assert not before[0].is_up
    assert len(balancer._servers) == used
    balancer.answered(before[0])
    assert before[0].is_up
    assert list(balancer._servers.values()) == before
    for selector in selectors:
        selector.released.set()
    balancer.close()


def test_another_server_stands_in_for_one_that_has_no_worker_until_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subset, "SUBSET_SIZE", 2)
    gone = Gone()
    balancer = balancer_of([gone, *(LocalKernels() for _ in range(3))])
    before = list(balancer._servers.values())
    balancer.failed(before[0], bngrad.DeadlineExceededError("late"))
    wait_until(lambda: len(balancer._servers) == 3)
    gone.is_back = True
    wait_until(lambda: list(balancer._servers.values()) == before)
    balancer.close()


def test_a_server_that_answers_a_call_before_it_is_asked_is_asked_after_its_next_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_balancer, "delay_s", lambda failures: 0.1)
    balancer = balancer_of([LocalKernels(), LocalKernels()])
    server, _ = balancer._servers.values()
    balancer.failed(server, bngrad.UnavailableError("for a test"))
    balancer.answered(server)
    wait_until(lambda: not server.is_probed)
    balancer.close()


def test_after_an_interrupt_at_any_step_a_server_that_failed_is_found_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balancer, "delay_s", lambda failures: 0.0)
    for step in itertools.count():
        balancer = balancer_of([LocalKernels(), LocalKernels()])
        server, _ = balancer._servers.values()
        fail = partial(balancer.failed, server, bngrad.UnavailableError("for a test"))
        is_over = not interrupt_at(step, fail, ("bngrad.", "threading"))
        wait_until(lambda: server.is_up and not server.is_probed)  # noqa: B023 - it is called here
        balancer.close()
        if is_over:
            break
    assert step > 10


def test_after_an_interrupt_at_any_step_the_next_look_up_has_a_new_server_used() -> None:
    for step in itertools.count():
        balancer = balancer_of([LocalKernels() for _ in range(3)], used=1)
        (first,) = balancer._servers.values()
        is_over = not interrupt_at(step, partial(balancer._use, TWO_SERVERS), ("bngrad.", "threading"))
        balancer._use(TWO_SERVERS)
        wait_until(lambda: balancer.acquire([first]) is not None)  # noqa: B023 - it is called here
        balancer.close()
        if is_over:
            break
    assert step > 10


def test_a_new_server_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_balancer, "delay_s", lambda failures: 10 * SECONDS)
    balancer = balancer_of([LocalKernels(), LocalKernels()], used=1)
    (first,) = balancer._servers.values()
    balancer._use(TWO_SERVERS)
    wait_until(lambda: balancer.acquire([first]) is not None)
    balancer.close()


def test_a_new_server_counts_as_up_where_no_thread_can_probe_it() -> None:
    balancer = balancer_of([LocalKernels(), LocalKernels()], used=1)
    (first,) = balancer._servers.values()
    with no_thread("bngrad-probe"):
        balancer._use(TWO_SERVERS)
    assert balancer.acquire([first]) is not None
    balancer.close()


def test_the_pauses_before_questions_grow_with_each_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []

    def delay_s(count: int) -> float:
        failures.append(count)
        return SECONDS if count == 5 else 0.0

    monkeypatch.setattr(load_balancer, "delay_s", delay_s)
    gone = Gone()
    balancer = balancer_of([gone, LocalKernels()])
    server, _ = balancer._servers.values()
    server.strikes = 2
    balancer.failed(server, bngrad.UnavailableError("for a test"))
    wait_until(lambda: failures == [3, 4, 5])
    assert gone.questions == 2
    balancer.close()


class Answering(LocalKernels):
    """A server that answers a question with the states of its workers, or an error."""

    def __init__(self, answer: Sequence[str] | Exception) -> None:
        super().__init__()
        self.timeout = math.inf
        self._answer = answer

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        self.timeout = deadline.timeout
        if isinstance(self._answer, Exception):
            raise self._answer
        info = super().server_info(deadline, cancellation)
        return replace(info, devices=tuple(Device("cpu", "", state, 0, 0) for state in self._answer))


@pytest.mark.parametrize(
    ("answer", "is_ready"),
    [
        ([], True),
        (["ready"], True),
        (["starting"], False),
        (["starting", "ready", "unspecified"], True),
        (bngrad.UnavailableError("gone"), False),
        (bngrad.DeadlineExceededError("late"), False),
        (bngrad.UnauthenticatedError("who is it?"), True),
        (RuntimeError("no token"), True),
    ],
    ids=str,
)
def test_a_server_is_ready_that_has_a_worker_which_is_or_may_be(
    answer: Sequence[str] | Exception, is_ready: bool
) -> None:
    server = Answering(answer)
    assert load_balancer._is_ready(server) == is_ready
    assert server.timeout < SECONDS


def test_calls_that_fail_together_are_one_failure_of_their_server() -> None:
    """The pauses between probes grow with the failures."""
    asked = Asked()
    balancer = balancer_of([asked, LocalKernels()])
    server, _ = balancer._servers.values()
    for _ in range(20):
        balancer.failed(server, bngrad.UnavailableError("for a test"))
    assert server.strikes == 1
    asked.released.set()
    balancer.close()


def test_a_server_that_cannot_be_connected_to_is_an_error_of_the_first_call_alone() -> None:
    """As where a certificate cannot be read."""
    targets, is_broken = ["127.0.0.1:1"], True

    def connect(*_: object) -> Selector:
        if is_broken:
            raise OSError("for a test")
        return LocalKernels()

    def servers(now: float) -> int:
        balancer.prepare(Deadline.after(SECONDS), Cancellation(), now)
        return len(balancer._servers)

    balancer = LoadBalancer(lambda: targets, list, connect)
    with pytest.raises(OSError, match="for a test"):
        servers(0.0)
    is_broken = False
    assert servers(0.0) == 1
    is_broken = True
    targets.append("127.0.0.1:2")
    balancer._use([resolver.Address(target) for target in targets])
    assert servers(0.0) == 1
    is_broken = False
    wait_until(lambda: servers(math.inf) == 2)
    balancer.close()


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "closed"])
def test_a_call_that_has_been_ended_waits_for_no_look_up(is_cancelled: bool) -> None:
    held, cancellation = threading.Event(), Cancellation()

    def targets() -> list[str]:
        held.wait(SECONDS)
        return ["127.0.0.1:1"]

    balancer = LoadBalancer(targets, list, lambda *_: LocalKernels())
    if is_cancelled:
        cancellation.cancel()
    else:
        balancer.close()
        held.set()
    with pytest.raises(bngrad.UnavailableError, match="the call was cancelled"):
        balancer.prepare(Deadline.after(SECONDS), cancellation, 0.0)
    assert held.is_set() is not is_cancelled
    assert not balancer._servers
    held.set()
    balancer.close()


def test_calls_make_reports_old(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, selectors = Clock(), (Reporting(300.0), Reporting(100.0))
    monkeypatch.setattr(upstream, "time", clock)
    for selector in selectors:
        selector.report(requests=0.0)
    balancer = balancer_of(selectors)
    for server in balancer._servers.values():
        balancer.answered(server)

    assert chosen_of(balancer) == {selectors[0]}
    clock.now += 10
    for server in balancer._servers.values():
        balancer.answered(server)  # with no newer report
    assert chosen_of(balancer) == set(selectors)
    balancer.close()


def chosen_of(balancer: LoadBalancer) -> set[Selector]:
    """Returns the servers of some calls, of which each ends before the next one begins."""
    selectors = set()
    for _ in range(100):
        use = balancer.acquire()
        assert use is not None
        selectors.add(use.server.selector)
        balancer.release(use)
    return selectors


def test_a_call_goes_to_the_server_that_has_its_tensor_unless_that_is_down() -> None:
    asked = Asked()
    balancer = balancer_of([asked, LocalKernels()])
    server, other = balancer._servers.values()

    def chosen(excluded: Sequence[Upstream] = ()) -> Upstream:
        use = balancer.acquire(excluded, preferred=[asked])
        assert use is not None
        return use.server

    assert {chosen() for _ in range(20)} == {server}
    assert chosen([server]) is other
    balancer.failed(server, bngrad.UnavailableError("for a test"))
    assert chosen() is other
    asked.released.set()
    balancer.close()


def test_a_server_that_reports_nothing_counts_as_one_of_the_usual_capacity() -> None:
    selectors = Reporting(300.0), LocalKernels()
    balancer = balancer_of(selectors)
    balancer.answered(next(iter(balancer._servers.values())))
    assert chosen_of(balancer) == set(selectors)
    balancer.close()


def test_slower_servers_get_calls_too_where_most_requests_are_those_of_others() -> None:
    selectors = Reporting(300.0), Reporting(100.0)
    balancer = balancer_of(selectors)
    for requests in range(10, 40):
        for selector, server in zip(selectors, balancer._servers.values(), strict=True):
            selector.report(requests)
            balancer.answered(server)
    assert chosen_of(balancer) == set(selectors)
    balancer.close()


@pytest.mark.parametrize(
    ("are_remote", "is_remote"), [([False, False], False), ([False, True], True), ([True, True], True)], ids=str
)
def test_tensors_travel_over_a_network_if_they_do_to_any_server(are_remote: list[bool], is_remote: bool) -> None:
    selectors = [LocalKernels() for _ in are_remote]
    for selector, value in zip(selectors, are_remote, strict=True):
        selector.is_remote = value
    balancer = balancer_of(selectors)
    assert balancer.is_remote == is_remote
    balancer.close()


class Reporting(LocalKernels):
    """A server that reports its rate under full load."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate
        self.report(1.0)

    def report(self, requests: float) -> None:
        """Reports anew, with this number of requests in the server."""
        self.load = LoadReport(self._rate, 1.0, requests)  # type: ignore[assignment]


def test_calls_that_ended_uncounted_have_a_client_use_no_more_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-C."""
    monkeypatch.setattr(subset, "SUBSET_SIZE", 2)
    balancer = balancer_of([LocalKernels() for _ in range(8)])
    for _ in range(20):
        assert balancer.acquire() is not None
    assert len(balancer._servers) == 2
    uses = [balancer.acquire() for _ in range(3)]
    assert len(balancer._servers) == 4
    balancer.close()
    del uses


def has_closed(selector: Selector) -> bool:
    assert isinstance(selector, TransportSelector)
    return selector._discovery._closed


def test_a_token_is_not_sent_unencrypted_to_a_host_that_a_function_names() -> None:
    with (
        bngrad.Client(lambda: ["192.0.2.1:1"], token=lambda: "alice") as client,
        pytest.raises(bngrad.UnavailableError, match=r"the token would travel unencrypted to 192\.0\.2\.1:1"),
    ):
        client.server_info()


def test_a_look_up_keeps_no_client_alive() -> None:
    asked, held = threading.Event(), threading.Event()

    def targets() -> list[str]:
        asked.set()
        held.wait(SECONDS)
        return ["127.0.0.1:1"]

    client = bngrad.Client(targets)
    problem = r"^the look-up of the servers did not end within the timeout of 0\.05 s$"
    with pytest.raises(bngrad.DeadlineExceededError, match=problem):
        client.server_info(timeout=0.05)
    assert asked.wait(SECONDS)
    balancer = weakref.ref(client._calls._load_balancer)
    del client
    gc.collect()
    assert balancer() is None
    held.set()
    wait_until(lambda: not any(thread.name == "bngrad-lookup" for thread in threading.enumerate()))


def test_closing_ends_calls_to_servers_that_are_no_longer_among_the_targets() -> None:
    arrived, released = threading.Event(), threading.Event()

    def hold(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        arrived.set()
        released.wait(SECONDS)
        return echo(method, request, context)

    with ExitStack() as stack:
        targets = [stack.enter_context(peer(hold))]
        stack.callback(released.set)
        client = bngrad.Client(lambda: targets, timeout=SECONDS / 2)
        threads = stack.enter_context(ThreadPoolExecutor(1))
        call = threads.submit(client.server_info)
        assert arrived.wait(SECONDS)
        with fleet(1) as served:
            targets[:] = served.targets

            def reach_other() -> bool:
                client.fused_batch_norm_grad_v2(*inputs(1))
                return served.get_calls(0)

            time.sleep(0.1)
            wait_until(reach_other)
            began = time.monotonic()
            client.close()
            with pytest.raises(bngrad.ClientClosedError):
                call.result(SECONDS)
            assert time.monotonic() - began < SECONDS / 4


def test_a_server_that_shares_no_memory_stays_up() -> None:
    with fleet(2) as served, bngrad.Client(served.targets) as client:
        client.empty((4,))
        assert all(server.is_up for server in client._calls._load_balancer._servers.values())


def test_the_pauses_between_probes_begin_anew_once_a_server_has_answered() -> None:
    with fleet(2) as served, bngrad.Client(served.targets) as client:
        balancer = client._calls._load_balancer
        server, _ = balancer._servers.values()
        for strikes in (1, 2):
            balancer.failed(server, bngrad.UnavailableError("for a test"))
            assert server.strikes == strikes
            wait_until(lambda: server.is_up)
        balancer.answered(server)
        assert server.strikes == 0
