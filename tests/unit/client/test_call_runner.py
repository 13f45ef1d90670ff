"""Retries, load balancing and closing, by both clients, against peers over real sockets."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from tests.servers import wait_until
from tests.unit.client.calls import (
    LARGE,
    MEDIUM,
    SECONDS,
    SMALL,
    ClientClass,
    inputs,
    interrupt_at,
    is_shared,
    located,
    right,
    tensor,
    use,
)
from tests.unit.client.endpoints import Server, server
from tests.unit.client.peer import echo, info, peer

import bngrad
import bngrad.aio
from bngrad import _call_runner
from bngrad._balancing import retry
from bngrad._balancing.upstream import Selector
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import NotSharedError
from bngrad._local import fallback
from bngrad._transports.selector import TransportSelector
from bngrad.typing import Transport
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.http2 import RpcError


def full(hint_s: float | None) -> bytes:
    """Returns the details of RESOURCE_EXHAUSTED: temporary with a hint of when to retry, permanent without."""
    status = status_pb2.Status(code=8, message="full")
    if hint_s is not None:
        detail = any_pb2.Any()
        seconds = int(hint_s)
        delay = duration_pb2.Duration(seconds=seconds, nanos=round((hint_s - seconds) * 1e9))
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(detail)
    return bytes(status.SerializeToString())


def exhausted(context: grpc.ServicerContext, hint_s: float | None) -> bytes:
    context.set_trailing_metadata((("grpc-status-details-bin", full(hint_s)),))
    return context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


class Flaky:
    """Answers the first calls with errors, and the others with their own inputs.

    Attributes:
        errors: The errors of the first calls, in turn: a status, or the hint of when to retry, in seconds.
        times: When calls came, on the monotonic clock.
    """

    def __init__(self, *errors: grpc.StatusCode | float) -> None:
        self.errors = list(errors)
        self.times: list[float] = []

    def __call__(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if method == "ServerInfo":
            return info(method, request, context)
        self.times.append(time.monotonic())
        if self.errors:
            error = self.errors.pop(0)
            if isinstance(error, grpc.StatusCode):
                return context.abort(error, "for a test")
            return exhausted(context, None if error < 0 else error)
        return echo(method, request, context)


def call(client_class: ClientClass, target: Any, timeout: float = SECONDS, **options: Any) -> Any:
    arrays = inputs(3)
    made = client_class(target, **options)
    results = use(made, lambda client: client.fused_batch_norm_grad_v2(*arrays, timeout=timeout))
    assert all(map(np.array_equal, results, arrays[1:]))


UNAVAILABLE, CANCELLED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("transport", ["auto", "unary", "stream"])
@pytest.mark.parametrize("errors", [[UNAVAILABLE], [CANCELLED], [0.1], [0.0, UNAVAILABLE, 0.1, UNAVAILABLE]])
def test_a_failed_call_is_repeated_until_it_is_answered(
    client_class: ClientClass, transport: Transport, errors: list[Any]
) -> None:
    flaky, arrays = Flaky(*errors), inputs(3)
    with peer(flaky) as target:
        made = client_class(target, transport=transport)
        answer = use(made, lambda client: client.server_info(), lambda client: client.fused_batch_norm_grad_v2(*arrays))
    assert all(map(np.array_equal, answer, arrays[1:]))
    assert len(flaky.times) == len(errors) + 1
    for error, first, second in zip(errors, flaky.times, flaky.times[1:], strict=False):
        assert second - first >= (0 if isinstance(error, grpc.StatusCode) else error)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, bngrad.InvalidArgumentError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, bngrad.DeadlineExceededError),
        (grpc.StatusCode.INTERNAL, bngrad.InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, bngrad.UnimplementedError),
        (-1.0, bngrad.ResourceExhaustedError),
    ],
)
def test_errors_that_would_recur_are_not_repeated(
    client_class: ClientClass, code: grpc.StatusCode | float, error: type[bngrad.BngradError]
) -> None:
    flaky = Flaky(code)
    with peer(flaky) as target, pytest.raises(error) as raised:
        call(client_class, target)
    assert len(flaky.times) == 1
    assert "attempts" not in str(raised.value)
    if isinstance(raised.value, bngrad.ResourceExhaustedError):
        assert raised.value.retry_delay_s is None


@pytest.mark.parametrize(
    ("code", "error"), [(UNAVAILABLE, bngrad.UnavailableError), (0.25, bngrad.ResourceExhaustedError)]
)
def test_retries_can_be_turned_off(client_class: ClientClass, code: Any, error: type[bngrad.BngradError]) -> None:
    flaky = Flaky(code)
    with peer(flaky) as target, pytest.raises(error) as raised:
        call(client_class, target, retries=False)
    assert len(flaky.times) == 1
    if isinstance(raised.value, bngrad.ResourceExhaustedError):
        assert raised.value.retry_delay_s == 0.25


@pytest.mark.parametrize("retries", [None, 1, "no"])
def test_retries_must_be_a_bool(client_class: ClientClass, retries: Any) -> None:
    with pytest.raises(TypeError, match="retries must be a bool, not "):
        client_class("localhost:1", retries=retries)


@pytest.mark.parametrize(
    ("options", "may_leave"),
    [({"retries": True}, True), ({"retries": False}, False), ({"retries": False, "fallback": "local"}, True)],
)
def test_only_calls_that_may_be_made_elsewhere_leave_a_server_that_is_silent(
    options: dict[str, Any], may_leave: bool
) -> None:
    with bngrad.Client(["127.0.0.1:1", "127.0.0.1:2"], **options) as client:
        for server in client._calls._load_balancer._servers.values():
            assert isinstance(server.selector, TransportSelector)
            assert server.selector._server._may_leave() is may_leave


def test_a_call_that_was_cancelled_says_nothing_of_its_server() -> None:
    cancellation = Cancellation()

    def attempt(server: Selector) -> None:
        cancellation.cancel()
        raise bngrad.UnavailableError("cancelled")

    with bngrad.Client(["127.0.0.1:1", "127.0.0.1:2"]) as client:
        with pytest.raises(bngrad.UnavailableError, match=r"^cancelled$"):
            client._calls._ask(attempt, Deadline.after(SECONDS), cancellation)
        assert all(server.is_up for server in client._calls._load_balancer._servers.values())


def test_a_call_that_is_cancelled_before_it_begins_is_not_made() -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    with bngrad.Client("127.0.0.1:1") as client, pytest.raises(bngrad.UnavailableError, match="the call was cancelled"):
        client._calls._run(lambda: pytest.fail("it was made"), cancellation)


def test_a_call_is_ended_by_a_client_that_closes_once_it_was_found_open(monkeypatch: pytest.MonkeyPatch) -> None:
    client = bngrad.Client("127.0.0.1:1")
    check_open = client._calls.check_open

    def check_and_close() -> None:
        check_open()
        client.close()

    monkeypatch.setattr(client._calls, "check_open", check_and_close)
    with pytest.raises(bngrad.ClientClosedError, match="was closed during the call"):
        client._calls._run(lambda: pytest.fail("it was made"), Cancellation())


def test_calls_are_not_repeated_in_a_long_outage_and_are_again_once_servers_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "delay_s", lambda failures, hint_s: 0.0)
    gone, unshared = bngrad.UnavailableError("gone"), NotSharedError("unshared")
    wrong = bngrad.InvalidArgumentError("wrong")

    def attempts_of(*errors: bngrad.BngradError) -> int:
        """Makes a call whose first attempts fail; returns how many it made, or raises."""
        made = 0

        def attempt(server: Selector) -> int:
            nonlocal made
            made += 1
            if made <= len(errors):
                raise errors[made - 1]
            return made

        return client._calls._ask(attempt, Deadline.after(SECONDS), Cancellation())

    with bngrad.Client("127.0.0.1:1") as client:
        assert attempts_of() == 1
        for error in (wrong, unshared):
            for _ in range(100):
                with pytest.raises(type(error)):
                    attempts_of(error)
        assert attempts_of(*[gone] * 20) == 21
        with pytest.raises(bngrad.UnavailableError):
            attempts_of(*[gone] * 20)
        for _ in range(100):
            attempts_of()
        assert attempts_of(gone) == 2


def test_calls_that_fail_at_the_same_time_share_the_cost_of_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "delay_s", lambda failures, hint_s: 0.0)
    callers, failures = 8, 20
    together = threading.Barrier(callers)

    def attempts(_: int) -> int:
        made, cancellation = 0, Cancellation()

        def attempt(server: Selector) -> int:
            nonlocal made
            together.wait(SECONDS)
            made += 1
            if made <= failures:
                raise bngrad.UnavailableError("gone")
            return made

        ask = partial(client._calls._ask, attempt, Deadline.after(SECONDS), cancellation)
        return client._calls._run(ask, cancellation)

    with bngrad.Client("127.0.0.1:1") as client, ThreadPoolExecutor(callers) as threads:
        client._calls._ask(lambda _: None, Deadline.after(SECONDS), Cancellation())
        assert list(threads.map(attempts, range(callers))) == [failures + 1] * callers


def test_a_retry_beyond_the_deadline_is_not_waited_for(client_class: ClientClass) -> None:
    flaky = Flaky(60.0)
    begin = time.monotonic()
    with peer(flaky) as target, pytest.raises(bngrad.ResourceExhaustedError) as raised:
        call(client_class, target, timeout=50)
    assert time.monotonic() - begin < SECONDS
    assert raised.value.retry_delay_s == 60


def test_the_last_error_gives_the_number_and_duration_of_the_attempts(client_class: ClientClass) -> None:
    begin = time.monotonic()
    with peer(Flaky(0.1, 0.1, 60.0)) as target, pytest.raises(bngrad.ResourceExhaustedError) as full:
        call(client_class, target)
    told = re.search(r"full \(3 attempts in (\d+\.\d) s\)$", str(full.value))
    assert told is not None
    assert 0.2 <= float(told[1]) <= time.monotonic() - begin + 0.05
    with (
        peer(Flaky(0.1, grpc.StatusCode.INTERNAL)) as target,
        pytest.raises(bngrad.InternalError, match=r"\(2 attempts in \d+\.\d s, before this one: .* full\)$") as broken,
    ):
        call(client_class, target)
    assert isinstance(broken.value.__cause__, grpc.RpcError)


@pytest.mark.parametrize("delay_s", [0.01, 0.0])
def test_without_a_deadline_an_unavailable_server_is_tried_five_times(
    client_class: ClientClass, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "delay_s", lambda failures, hint_s: delay_s)
    flaky = Flaky(*[UNAVAILABLE] * 9)
    with peer(flaky) as target, pytest.raises(bngrad.UnavailableError, match=r"\(5 attempts in "):
        call(client_class, target, timeout=math.inf)
    assert len(flaky.times) == 5


@pytest.mark.parametrize("delay_s", [1.0, 0.0])
def test_an_address_that_has_never_answered_is_not_tried_again(
    client_class: ClientClass, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "delay_s", lambda failures, hint_s: delay_s)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{bound.getsockname()[1]}"
        for transport in ("auto", "unary"):
            begin = time.monotonic()
            with pytest.raises(bngrad.UnavailableError, match=r"Is `bngrad serve` running there\?$"):
                call(client_class, target, transport=transport)
            assert time.monotonic() - begin < SECONDS / 2


def test_an_array_in_own_memory_does_not_count_as_an_answer(client_class: ClientClass) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        made = client_class(f"127.0.0.1:{bound.getsockname()[1]}", transport="unary")
        with pytest.raises(bngrad.UnavailableError, match=r"running there\?$"):
            use(made, lambda client: client.empty(3), lambda client: client.server_info())


@pytest.mark.parametrize("options", [{"grpc.keepalive_time_ms": 1}, ("grpc.keepalive_time_ms", 1), [(1, 2)], None])
def test_options_must_be_pairs(client_class: ClientClass, options: Any) -> None:
    with pytest.raises(TypeError, match=r"options must be pairs such as .*, not "):
        client_class("localhost:1", options=options)


@pytest.mark.parametrize("target", ["localhost:1", "127.0.0.1:1"])
def test_wrong_options_are_an_error_at_once(client_class: ClientClass, target: str) -> None:
    with pytest.raises(TypeError):
        use(client_class(target, options=[("grpc.keepalive_time_ms", object())]), lambda client: client.server_info())


def test_closing_ends_the_wait_for_a_retry() -> None:
    flaky = Flaky(40.0)
    with peer(flaky) as target, ThreadPoolExecutor(1) as threads, bngrad.Client(target) as client:
        waiting = threads.submit(client.fused_batch_norm_grad_v2, *inputs(1))
        wait_for(flaky)
        client.close()
        with pytest.raises(bngrad.ClientClosedError, match="was closed during the call"):
            waiting.result(SECONDS)


async def test_closing_and_cancelling_end_an_asynchronous_wait_for_a_retry() -> None:
    flaky = Flaky(40.0, 40.0)
    with peer(flaky) as target:
        client = bngrad.aio.Client(target)
        first, second = (asyncio.create_task(client.fused_batch_norm_grad_v2(*inputs(1))) for _ in range(2))
        await asyncio.to_thread(wait_for, flaky, 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await client.close()
        with pytest.raises(bngrad.ClientClosedError, match="was closed during the call"):
            await asyncio.wait_for(second, SECONDS)


def test_a_call_that_finds_its_connection_closed_says_that_the_client_was() -> None:
    def close() -> str:
        client.close()
        return "alice"

    with peer(info) as target:
        client = bngrad.Client(target, token=close)
        with pytest.raises(bngrad.ClientClosedError, match="was closed during the call"):
            client.server_info()


def wait_for(flaky: Flaky, calls: int = 1) -> None:
    """Waits until this many calls have come, and a moment longer, for their answers to arrive."""
    wait_until(lambda: len(flaky.times) >= calls)
    time.sleep(0.1)


@contextmanager
def peers(*answers: Any) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(peer(answer)) for answer in answers]


def test_calls_are_spread_over_servers(client_class: ClientClass) -> None:
    flaky = [Flaky() for _ in range(3)]
    arrays = inputs(3)
    with peers(*flaky) as targets:
        use(client_class(targets), *[lambda client: client.fused_batch_norm_grad_v2(*arrays)] * 90)
    assert sum(len(each.times) for each in flaky) == 90
    assert min(len(each.times) for each in flaky) >= 10


def test_the_next_call_goes_to_the_server_with_the_fewest_calls() -> None:
    released, ways = threading.Event(), Counter[str]()

    def slow(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if method != "ServerInfo":
            ways["slow"] += 1
            released.wait(SECONDS)
        return echo(method, request, context)

    def quick(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        ways["quick"] += method != "ServerInfo"
        return echo(method, request, context)

    with peers(slow, quick) as targets, bngrad.Client(targets) as client, ThreadPoolExecutor(4) as threads:
        done = [threads.submit(client.fused_batch_norm_grad_v2, *inputs(number)) for number in range(40)]
        wait_until(lambda: sum(each.done() for each in done) >= 36 or ways["slow"] >= 4)
        released.set()
        assert all(each.result(SECONDS) for each in done)
    assert ways["quick"] > 4 * ways["slow"]


@pytest.mark.parametrize("error", [UNAVAILABLE, 25.0])
def test_a_refused_call_goes_to_another_server_at_once(client_class: ClientClass, error: Any) -> None:
    flaky = [Flaky(*[error] * 50), Flaky()]
    with peers(*flaky) as targets:
        for calls in range(1, 51):  # the first server is chosen at random
            begin = time.monotonic()
            call(client_class, targets)
            assert time.monotonic() - begin < 10
            assert len(flaky[1].times) == calls
            if flaky[0].times:
                break
    assert flaky[0].times


def test_a_call_that_every_server_refuses_waits_for_the_shortest_hint(client_class: ClientClass) -> None:
    flaky = [Flaky(25.0), Flaky(0.3)]
    with peers(*flaky) as targets:
        call(client_class, targets)
    assert [len(each.times) for each in flaky] == [1, 2]
    assert flaky[1].times[1] - flaky[1].times[0] >= 0.3


def test_calls_go_to_the_servers_that_are_up(client_class: ClientClass) -> None:
    with socket.socket() as bound, peer(echo) as target:
        bound.bind(("127.0.0.1", 0))
        for _ in range(4):
            call(client_class, [f"127.0.0.1:{bound.getsockname()[1]}", target])


def test_a_call_that_is_repeated_for_a_while_finds_servers_that_were_not_there_when_it_began(
    client_class: ClientClass,
) -> None:
    def fail(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        targets[:] = [other]
        return info(method, request, context) if method == "ServerInfo" else context.abort(UNAVAILABLE, "for a test")

    with peer(fail) as first, peer(echo) as other:
        targets = [first]
        call(client_class, lambda: list(targets), SECONDS)


def test_addresses_that_have_all_never_answered_are_not_tried_again(client_class: ClientClass) -> None:
    with socket.socket() as bound, socket.socket() as other:
        for each in (bound, other):
            each.bind(("127.0.0.1", 0))
        begin = time.monotonic()
        with pytest.raises(bngrad.UnavailableError, match=r"is not available: .* \(\d attempts in "):
            call(client_class, [f"127.0.0.1:{each.getsockname()[1]}" for each in (bound, other)])
        assert time.monotonic() - begin < SECONDS / 2


@pytest.mark.slow
def test_a_server_that_exceeds_a_deadline_gets_no_calls_until_it_answers() -> None:
    stands_still = threading.Event()
    stands_still.set()
    released = threading.Event()

    def still(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if stands_still.is_set():
            released.wait(SECONDS)
        return echo(method, request, context)

    flaky = Flaky()
    with peers(still, flaky) as targets, bngrad.Client(targets) as client:
        failures = 0
        for _ in range(40):
            try:
                client.fused_batch_norm_grad_v2(*inputs(1), timeout=SECONDS if failures else 5)
            except bngrad.DeadlineExceededError:
                failures += 1
        stands_still.clear()
        released.set()
    assert failures == 1
    assert len(flaky.times) == 39


def test_a_server_that_is_up_again_gets_calls_once_a_worker_is_ready() -> None:
    state, flaky = [pb.WORKER_STATE_STARTING], [Flaky(UNAVAILABLE), Flaky()]

    def starting(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if method == "ServerInfo":
            return pb.ServerInfoResponse(devices=[pb.Device(name="cpu", state=state[0])]).SerializeToString()
        return flaky[0](method, request, context)

    def calls_until(enough: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not enough() and time.monotonic() < until:
            client.fused_batch_norm_grad_v2(*inputs(1))
        return enough()

    with peers(starting, flaky[1]) as targets, bngrad.Client(targets) as client:
        assert calls_until(lambda: len(flaky[0].times) == 1, SECONDS)
        assert not calls_until(lambda: len(flaky[0].times) > 1, 0.5)
        state[0] = pb.WORKER_STATE_READY
        assert calls_until(lambda: len(flaky[0].times) > 1, SECONDS)


@pytest.mark.parametrize(
    ("transport", "shape", "way"),
    [("auto", SMALL, "local"), ("auto", LARGE, "shared"), ("shared", SMALL, "shared"), ("stream", LARGE, "tcp")],
)
@pytest.mark.parametrize(
    "errors",
    [[RpcError(8, "full", full(0.1))], [RpcError(14, "stopping")], [RpcError(14, "stopping")] * 3],
    ids=["full", "stopping", "stopping-thrice"],
)
def test_a_failed_call_is_repeated_on_every_transport(
    served: Server, transport: Transport, shape: tuple[int, ...], way: str, errors: list[RpcError]
) -> None:
    left, times = list(errors), []

    def fail(came: str) -> None:
        times.append(time.monotonic())
        if left:
            raise left.pop(0)

    with bngrad.Client(served.target, transport=transport) as client:
        served.on_call = fail
        out = client.empty(shape)
        assert right(client, tensor(shape), served, out=out) is out
    assert served.ways == [way]
    assert len(times) == len(errors) + 1
    assert times[-1] - times[0] >= (0.1 if errors[0].code == 8 else 0)


def test_a_repeated_call_waits_until_the_attempt_before_it_cannot_write(served: Server) -> None:
    """The connection is cut while the server computes; it then writes to the caller's array."""
    arrived, released = threading.Event(), threading.Event()

    def cut(way: str) -> None:
        if way == "shared" and not arrived.is_set():
            arrived.set()
            served.local.cut()
            released.wait(SECONDS)

    with bngrad.Client(served.target) as client, ThreadPoolExecutor(1) as threads:
        client.server_info()
        x, out = located(client, LARGE), client.empty(LARGE)
        assert is_shared(client, out)
        served.on_call = cut
        done = threads.submit(right, client, x, served, out=out)
        assert arrived.wait(SECONDS)
        time.sleep(0.3)
        assert not done.done()
        assert served.ways == []
        released.set()
        assert done.result(SECONDS) is out
        assert len(served.ways) == 2


def test_an_array_in_quarantine_is_waited_for_at_other_servers_too(served: Server) -> None:
    arrived, released = threading.Event(), threading.Event()

    def hold(way: str) -> None:
        if way == "shared":  # on a busy machine the call may come by another transport
            arrived.set()
            released.wait(SECONDS)

    with server() as other, bngrad.Client([served.target, other.target]) as client:
        out = client.empty(LARGE)
        served.on_call = hold
        x, stats = tensor(LARGE), np.ones(LARGE[-1], np.float32)

        def run(timeout: float) -> None:
            client.fused_batch_norm_grad_v2(x, x, stats, stats, stats, out=out, timeout=timeout)

        until = time.monotonic() + SECONDS
        while not arrived.is_set() and time.monotonic() < until:
            try:
                run(0.3)
            except bngrad.DeadlineExceededError:
                continue
        before = len(other.ways)
        with pytest.raises(bngrad.DeadlineExceededError, match="a call that failed may still write to an array"):
            run(0.3)
        assert len(other.ways) == before
        released.set()
        run(SECONDS)


def test_a_call_is_not_computed_here_while_a_server_may_still_write_to_its_out(served: Server) -> None:
    released = threading.Event()

    def cut(way: str) -> None:
        served.local.cut()
        released.wait(SECONDS)

    with bngrad.Client(served.target, transport="shared", retries=False, fallback="local") as client:
        x, out = located(client, LARGE), client.empty(LARGE)
        served.on_call = cut
        with pytest.raises(bngrad.UnavailableError):
            right(client, x, served, out=out)
        released.set()
        assert client.fallback_calls == 0


def test_no_call_in_an_outage_is_computed_here_while_a_server_may_still_write_to_its_out(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_FIRST_PAUSE_S", 3600.0)
    released = threading.Event()

    def cut(way: str) -> None:
        served.local.cut()
        released.wait(SECONDS)

    with bngrad.Client(served.target, transport="shared", retries=False, fallback="local") as client:
        x, out, stats = located(client, LARGE), client.empty(LARGE), np.ones(LARGE[-1], np.float32)

        def run(**options: Any) -> object:
            return client.fused_batch_norm_grad_v2(x, x, stats, stats, stats, **options)

        served.on_call = cut
        with pytest.raises(bngrad.UnavailableError):
            run(out=out)
        run()
        assert client.fallback_calls == 1
        with pytest.raises(bngrad.DeadlineExceededError, match="a call that failed may still write to an array"):
            run(out=out, timeout=0.3)
        run()
        assert client.fallback_calls == 2
        released.set()


def test_closing_ends_the_lease_of_an_output_that_a_server_may_still_write(served: Server) -> None:
    released = threading.Event()

    def cut(way: str) -> None:
        served.local.cut()
        released.wait(SECONDS)

    client = bngrad.Client(served.target, transport="shared", retries=False)
    x = located(client, LARGE)
    served.on_call = cut
    with pytest.raises(bngrad.UnavailableError):
        right(client, x, served)
    assert len(served.regions) == 1
    client.close()
    wait_until(lambda: len(served.regions) == 0)
    released.set()


def test_closing_frees_the_memory_of_arrays_that_no_server_shares(served: Server) -> None:
    client = bngrad.Client(served.target, transport="stream")
    client.empty(LARGE)
    (region,) = map(weakref.ref, client._calls._own_memory._regions)
    client.close()
    assert region() is None


def test_closing_ends_the_thread_that_sends_a_tensor_ahead(served: Server) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert may_end.wait(2 * SECONDS)

    served.on_ahead = hold
    client = bngrad.Client(served.target, transport="stream")
    handle = client.send_ahead(tensor(LARGE))
    try:
        assert begun.wait(SECONDS)
        client.close()
        thread = client._calls._ahead._thread
        thread.join(SECONDS)
        assert not thread.is_alive()
    finally:
        may_end.set()
    handle.close()


def test_a_forked_child_that_closes_the_client_ends_no_lease_of_its_parent(served: Server) -> None:
    program = """
        import os, signal, sys
        import bngrad
        client = bngrad.Client(sys.argv[1])
        array = client.empty((8, 64, 64, 16))
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            client.close()
            os._exit(0)
        (server,) = client._calls._load_balancer._servers.values()
        pool = server.selector._discovery._current.pool
        print(os.waitpid(child, 0)[1], pool.check(), pool.locate(array) is not None)
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), served.target]
    assert subprocess.run(command, timeout=60, check=True, capture_output=True).stdout == b"0 False True\n"


@pytest.mark.parametrize("kind", ["op", "empty"])
def test_a_client_with_a_fallback_asks_servers_that_have_gone_no_longer_than_its_patience(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_call_runner, "_PATIENCE_S", 0.1)
    has_gone = False

    def answer(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        return context.abort(UNAVAILABLE, "for a test") if has_gone else echo(method, request, context)

    arrays = inputs(3)
    with peer(answer) as target, bngrad.Client(target, timeout=SECONDS, fallback="local") as client:
        client.server_info()
        has_gone = True
        began = time.monotonic()
        if kind == "op":
            client.fused_batch_norm_grad_v2(*arrays)
            assert client.fallback_calls == 1
        else:
            assert client.empty(3).shape == (3,)
        assert time.monotonic() - began < SECONDS / 2


def test_an_array_is_made_at_once_while_calls_are_computed_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call_runner, "_PATIENCE_S", 0.1)
    asked = 0

    def answer(method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        nonlocal asked
        asked += 1
        return context.abort(UNAVAILABLE, "for a test")

    with peer(answer) as target, bngrad.Client(target, timeout=SECONDS, fallback="local") as client:
        client.fused_batch_norm_grad_v2(*inputs(3))
        assert client.fallback_calls == 1
        before = asked
        assert client.empty(3).shape == (3,)
        assert asked == before


def test_an_array_comes_from_the_next_server_where_the_first_shares_no_memory(served: Server) -> None:
    with peer(info) as other, bngrad.Client([other, served.target], retries=False) as client:
        client.empty(LARGE)
        assert len(served.regions) == 1


@pytest.mark.parametrize("transport", ["auto", "unary", "stream"])
@pytest.mark.parametrize("errors", [[UNAVAILABLE], [grpc.StatusCode.INVALID_ARGUMENT], [0.01, -1.0]])
def test_a_call_that_failed_keeps_no_tensors(transport: Transport, errors: list[Any]) -> None:
    _, _, *stats = inputs(3)
    x = np.ones((2, 3, 3, 4), np.float32)
    kept = weakref.ref(x)
    with peer(Flaky(*errors)) as target, bngrad.Client(target, transport=transport) as client:
        client.server_info()
        gc.disable()
        try:
            with suppress(bngrad.BngradError):
                client.fused_batch_norm_grad_v2(x, x, *stats)
            del x
            assert kept() is None
        finally:
            gc.enable()


def test_a_token_function_that_fails_in_a_probe_costs_no_server() -> None:
    failed = threading.Event()

    def token() -> str:
        if threading.current_thread().name == "bngrad-probe" and not failed.is_set():
            failed.set()
            raise RuntimeError("for a test")
        return "alice"

    first, second = Flaky(UNAVAILABLE), Flaky()
    with peers(first, second) as targets, bngrad.Client(targets, token=token) as client:
        until = time.monotonic() + SECONDS
        while len(first.times) < 3 and time.monotonic() < until:
            client.fused_batch_norm_grad_v2(*inputs(1))
    assert failed.is_set()
    assert len(first.times) >= 3


def test_probes_end_with_a_client_that_was_never_closed() -> None:
    with socket.socket() as bound, peer(echo) as target:
        bound.bind(("127.0.0.1", 0))
        client = bngrad.Client([f"127.0.0.1:{bound.getsockname()[1]}", target])
        before, probes = set(threading.enumerate()), set[threading.Thread]()
        until = time.monotonic() + SECONDS
        while not probes and time.monotonic() < until:
            client.fused_batch_norm_grad_v2(*inputs(1))
            probes = {thread for thread in set(threading.enumerate()) - before if thread.name == "bngrad-probe"}
        assert probes
        del client
        while any(thread.is_alive() for thread in probes) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert not any(thread.is_alive() for thread in probes)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of sockets that have gone unclosed
def test_after_an_interrupt_at_any_step_no_call_is_in_flight() -> None:
    with server() as served, bngrad.Client(served.target, transport="stream") as client:
        x = tensor(SMALL)
        right(client, x, served)
        balancer = client._calls._load_balancer
        (upstream,) = balancer._servers.values()
        for step in itertools.count():
            is_over = not interrupt_at(step, lambda: right(client, x, served))
            assert not client._calls._running
            assert not upstream.in_flight
            assert not balancer._count_again()
            if is_over:
                break
        assert step > 100


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as above
@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_a_handler_of_a_signal_may_close_the_client_at_any_step_of_a_call(transport: Transport) -> None:
    def close_at(step: int, client: bngrad.Client) -> bool:
        left = step

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal left
            if event in ("call", "return", "c_return") and frame.f_globals["__name__"].startswith("bngrad."):
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    client.close()

        sys.setprofile(profile)
        try:
            with suppress(bngrad.ClientClosedError):
                right(client, x, served)
        finally:
            sys.setprofile(None)
        return left < 0

    with server() as served:
        x = tensor(MEDIUM)
        for step in itertools.count(0, 5):
            with bngrad.Client(served.target, transport=transport) as client:
                right(client, x, served)
                if not close_at(step, client):
                    break
        assert step > 100
