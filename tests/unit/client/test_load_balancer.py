"""Servers that come and go while calls are made, against peers over real sockets."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from tests.clock import Clock
from tests.servers import wait_until
from tests.unit.client.calls import SECONDS, ClientClass, inputs, no_thread
from tests.unit.client.endpoints import full_listener
from tests.unit.client.peer import echo, peer

import bngrad
import bngrad.aio
from bngrad._balancing import resolver, subset, upstream
from bngrad._balancing.load_balancer import LoadBalancer
from bngrad._balancing.upstream import Selector, Upstream
from bngrad._deadline import Cancellation, Deadline
from bngrad._local.kernels import LocalKernels
from bngrad._results import ServerInfo
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
            use = balancer.acquire()
            assert use is not None
            selector = use.server.selector
            targets[:] = served.targets[1:2]
            wait_until(lambda: gets_calls(1))
            assert not has_closed(selector)
            if ended_by == "itself":
                balancer.release(use)
            else:
                del use  # Ctrl-C came before it was released
                targets[:] = served.targets[2:]
                wait_until(lambda: gets_calls(2))
            assert has_closed(selector)


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


def balancer_of(selectors: Sequence[Selector]) -> LoadBalancer:
    """Returns the load balancer of a client with these servers, after its first look-up."""
    left = iter(selectors)
    targets = [f"127.0.0.1:{number}" for number in range(1, len(selectors) + 1)]
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


def test_a_thread_that_asks_a_server_again_and_again_keeps_no_client_alive() -> None:
    class Gone(LocalKernels):
        questions = 0

        def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
            self.questions += 1
            raise bngrad.UnavailableError("for a test")

    gone = Gone()
    balancer = balancer_of([gone, LocalKernels()])
    balancer.failed(next(iter(balancer._servers.values())), bngrad.UnavailableError("for a test"))
    wait_until(lambda: gone.questions > 1)
    kept = weakref.ref(balancer)
    del balancer
    wait_until(lambda: gc.collect() >= 0 and kept() is None)


def test_an_only_server_that_failed_is_not_asked() -> None:
    balancer = balancer_of([LocalKernels()])
    use = balancer.acquire()
    assert use is not None
    balancer.failed(use.server, bngrad.UnavailableError("for a test"))
    assert use.server.is_up
    assert not use.server.is_probed
    balancer.close()


def test_calls_make_reports_old(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, selectors = Clock(), (Reporting(300.0), Reporting(100.0))
    monkeypatch.setattr(upstream, "time", clock)
    balancer = balancer_of(selectors)
    for server in balancer._servers.values():
        balancer.answered(server)

    def chosen() -> set[Selector]:
        uses = []
        for _ in range(40):
            use = balancer.acquire()
            assert use is not None
            uses.append(use.server.selector)
            balancer.release(use)
        return set(uses)

    assert chosen() == {selectors[0]}
    clock.now += 10
    assert chosen() == set(selectors)
    balancer.close()


class Reporting(LocalKernels):
    """A server that reports its rate under full load."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.load = LoadReport(rate, 1.0, 1.0)  # type: ignore[assignment]


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
