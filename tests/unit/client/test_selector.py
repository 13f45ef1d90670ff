"""The choice of a transport, with a server in this process that has every endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from tests.servers import wait_until
from tests.unit.client.calls import (
    LARGE,
    MEDIUM,
    SECONDS,
    SMALL,
    inputs,
    is_shared,
    located,
    right,
    selector_of,
    shared_pool,
    tensor,
)
from tests.unit.client.endpoints import Endpoint, Server, endpoint, full_listener, server

import bngrad
from bngrad._errors import NotSharedError
from bngrad._transports import connector, endpoints
from bngrad.typing import Transport
from bngrad_wire.http2 import RpcError
from bngrad_wire.lease_protocol import CALLS, REGIONS


@pytest.mark.parametrize(
    ("transport", "without", "shape", "way"),
    [
        ("auto", (), SMALL, "local"),
        ("auto", (), (4, 16, 16, 15), "local"),
        ("auto", (), (4, 16, 16, 16), "shared"),
        ("auto", (), LARGE, "shared"),
        ("auto", ("local",), SMALL, "tcp"),
        ("auto", ("local",), LARGE, "tcp"),
        ("auto", ("tcp",), LARGE, "shared"),
        ("auto", ("local", "tcp"), SMALL, "grpc"),
        ("auto", ("local", "tcp"), LARGE, "grpc"),
        ("shared", (), SMALL, "shared"),
        ("shared", (), LARGE, "shared"),
        ("stream", (), SMALL, "tcp"),
        ("stream", (), LARGE, "tcp"),
        ("stream", ("tcp",), LARGE, "local"),
        ("stream", ("local", "tcp"), SMALL, "grpc"),
        ("stream", ("local", "tcp"), LARGE, "grpc"),
        ("unary", (), SMALL, "grpc"),
        ("unary", (), LARGE, "grpc"),
    ],
)
def test_a_call_takes_the_fastest_transport_available(
    served: Server, transport: Transport, without: tuple[str, ...], shape: tuple[int, ...], way: str
) -> None:
    for missing in without:
        served.endpoints.ClearField("local_directory" if missing == "local" else "stream_port")
    with bngrad.Client(served.target, transport=transport) as client:
        for _ in range(3):
            right(client, tensor(shape), served)
    assert served.ways == [way] * 3
    assert served.infos <= 1


@pytest.mark.parametrize("transport", ["auto", "stream", "shared", "unary"])
def test_out_gets_the_gradient_on_every_transport(served: Server, transport: Transport) -> None:
    orders: list[Literal["C", "F"]] = ["C", "F"]
    with bngrad.Client(served.target, transport=transport) as client:
        for shape, dtype, order in itertools.product([SMALL, LARGE, (0, 2, 2, 4)], [np.float16, np.float32], orders):
            out = np.empty(shape, dtype, order)
            assert right(client, tensor(shape, dtype), served, out=out) is out


def test_calls_with_large_shared_arrays_copy_nothing(served: Server) -> None:
    with bngrad.Client(served.target) as client:
        client.server_info()
        x, out = located(client, LARGE), client.empty(LARGE)
        assert is_shared(client, x)
        before = len(served.ways)
        shared = shared_pool(client)
        assert shared is not None
        used = shared._regions[0].used
        assert right(client, x, served, out=out) is out
        assert served.ways[before:] == ["shared"]
        assert shared._regions[0].used <= used + x.nbytes + 4096  # y_backprop alone


@pytest.mark.parametrize(("transport", "regions"), [("auto", 1), ("shared", 1), ("stream", 0), ("unary", 0)])
def test_memory_is_leased_only_where_calls_use_it(served: Server, transport: Transport, regions: int) -> None:
    with bngrad.Client(served.target, transport=transport) as client:
        assert client.empty(LARGE).shape == LARGE
        assert len(served.regions) == regions


def test_closing_frees_the_memory_of_results(served: Server) -> None:
    with bngrad.Client(served.target, transport="stream") as client:
        right(client, tensor(LARGE), served)
        (region,) = map(weakref.ref, selector_of(client)._own_memory._regions)
    assert region() is None


def test_results_in_shared_memory_outlive_their_client(served: Server) -> None:
    x = tensor(LARGE)
    with bngrad.Client(served.target, transport="shared") as client:
        results = [right(client, x + i, served) for i in range(5)]
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, x + i)
        assert result.flags.writeable


def test_threads_get_their_own_answers_on_every_transport(served: Server) -> None:
    with bngrad.Client(served.target) as client, ThreadPoolExecutor(8) as threads:

        def is_right(number: int) -> bool:
            shape = MEDIUM if number % 2 else SMALL
            x, stats = np.full(shape, number, np.float32), np.full(shape[-1], -number, np.float32)
            results = client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
            return all(map(np.array_equal, results, (x, stats, stats, stats, stats)))

        assert all(threads.map(is_right, range(200)))
    assert sorted(set(served.ways)) == ["local", "shared"]


@pytest.mark.parametrize(
    ("transport", "shape", "lost", "way"),
    [
        ("auto", SMALL, ["local"], "tcp"),
        ("auto", LARGE, ["local"], "tcp"),
        ("auto", LARGE, ["tcp"], "shared"),
        ("auto", SMALL, ["local", "tcp"], "grpc"),
        ("auto", LARGE, ["local", "tcp"], "grpc"),
        ("stream", LARGE, ["tcp"], "local"),
        ("stream", LARGE, ["local", "tcp"], "grpc"),
    ],
)
@pytest.mark.parametrize("when", ["before", "between"])
def test_calls_succeed_without_endpoints_that_cannot_be_reached(
    served: Server, transport: Transport, shape: tuple[int, ...], lost: list[str], way: str, when: str
) -> None:
    with bngrad.Client(served.target, transport=transport) as client:
        if when == "between":
            right(client, tensor(shape), served)
            served.ways.clear()
        for endpoint in lost:
            getattr(served, endpoint).close()
        for _ in range(3):
            right(client, tensor(shape), served)
    assert served.ways == [way] * 3
    # At first, after each loss, and once more if the Unix socket cannot be reached from the start.
    assert served.infos <= 1 + len(lost) + (when == "before")


@pytest.mark.parametrize(
    ("transport", "shape", "dies", "then"),
    [
        ("auto", SMALL, ["local"], "tcp"),
        ("auto", LARGE, ["shared"], "local"),
        ("auto", LARGE, ["shared", "local"], "tcp"),
        ("stream", LARGE, ["tcp"], "local"),
        ("stream", LARGE, ["tcp", "local"], "grpc"),
    ],
)
def test_a_call_whose_endpoint_fails_is_made_on_another(
    served: Server, transport: Transport, shape: tuple[int, ...], dies: list[str], then: str
) -> None:
    def die(way: str) -> None:
        if way in dies:
            raise ConnectionError

    with bngrad.Client(served.target, transport=transport) as client:
        right(client, tensor(shape), served)
        served.on_call = die
        right(client, tensor(shape), served, out=np.empty(shape, np.float32))
    assert served.ways == [dies[0], then]


def test_an_endpoint_is_tried_again_after_a_while(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_BLOCKED_S", 0.05)
    is_dead = True

    def die(way: str) -> None:
        if way == "tcp" and is_dead:
            raise ConnectionError

    served.on_call = die
    with bngrad.Client(served.target, transport="stream") as client:
        right(client, tensor(SMALL), served)
        assert served.ways == ["local"]
        is_dead = False
        until = time.monotonic() + SECONDS
        while served.ways[-1] != "tcp" and time.monotonic() < until:
            time.sleep(0.01)
            right(client, tensor(SMALL), served)
    assert served.ways[-1] == "tcp"


def test_an_unreachable_endpoint_is_tried_less_and_less_often(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(endpoints, "time", SimpleNamespace(monotonic=lambda: now))
    with socket.socket() as bound, bngrad.Client(served.target, transport="stream") as client:
        bound.bind(("127.0.0.1", 0))
        served.endpoints.stream_port = bound.getsockname()[1]
        asked = []
        for _ in range(200):
            before = served.infos
            right(client, tensor(SMALL), served)
            if served.infos > before:
                asked.append(now)
            now += 1.0
    assert set(served.ways) == {"local"}
    # Before every attempt, and again after it.
    assert [at - 1000 for at in asked] == [0, 1, 10, 11, 30, 31, 70, 71, 150, 151]


@pytest.mark.parametrize(
    ("transport", "without", "is_remote"),
    [
        ("auto", "local_directory", True),
        ("stream", "local_directory", True),
        ("shared", "local_directory", False),  # calls go to other servers
        ("unary", "local_directory", False),
        ("auto", "stream_port", False),
        ("auto", "", False),
    ],
)
def test_tensors_travel_over_a_network_by_the_port_of_a_server_on_another_host(
    served: Server, transport: Transport, without: str, is_remote: bool
) -> None:
    if without == "local_directory":
        served.endpoints.local_directory = "/nowhere"  # on this host
    elif without:
        served.endpoints.ClearField("stream_port")
    with bngrad.Client(served.target, transport=transport) as client:
        with contextlib.suppress(NotSharedError):
            right(client, tensor(SMALL), served)
        assert selector_of(client).is_remote == is_remote


def test_memory_of_a_directory_that_a_server_no_longer_tells_is_given_back(served: Server) -> None:
    with server() as other, bngrad.Client(served.target, transport="stream") as client:
        right(client, tensor(SMALL), served)
        shared = shared_pool(client)
        assert shared is not None
        shared.empty((1,), np.dtype(np.float32))
        assert len(served.regions) == 1
        served.endpoints.local_directory = other.endpoints.local_directory
        served.tcp.close()
        for _ in range(2):
            right(client, tensor(SMALL), served)
        wait_until(lambda: not len(served.regions))
        assert (served.ways, other.ways) == (["tcp", "local"], ["local"])


def test_losing_the_tcp_port_keeps_the_shared_memory(served: Server) -> None:
    with bngrad.Client(served.target, transport="stream") as client:
        right(client, tensor(SMALL), served)
        shared = shared_pool(client)
        assert shared is not None
        array = shared.empty((1,), np.dtype(np.float32))
        served.tcp.close()
        right(client, tensor(SMALL), served)
        right(client, tensor(SMALL), served)
        assert shared_pool(client) is shared
        assert is_shared(client, array)
    assert served.ways == ["tcp", "local", "local"]


def test_a_server_that_leases_no_memory_gets_calls_on_its_unix_socket() -> None:
    with server(max_shared_nbytes=0) as served, bngrad.Client(served.target) as client:
        right(client, tensor(LARGE), served)
        with no_pause():
            assert client.empty(SMALL).shape == SMALL
        assert served.ways == ["local"]
        with bngrad.Client(served.target, transport="shared") as strict:
            for make in (lambda: right(strict, tensor(LARGE), served), lambda: strict.empty(SMALL)):
                with pytest.raises(bngrad.UnavailableError, match="shares no memory with this client: a region of "):
                    make()


@contextlib.contextmanager
def no_pause() -> Iterator[None]:
    """Fails if a call waits before another attempt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bngrad._balancing.retry.delay_s", lambda *_: pytest.fail("the call waits"))
        yield


def test_transport_shared_says_why_no_memory_may_be_shared(served: Server) -> None:
    served.endpoints.ClearField("local_directory")
    x = tensor(SMALL)
    why = "it is on another host, in another container or of another user, or shares none"
    with (
        bngrad.Client(served.target, transport="shared") as client,
        no_pause(),
        pytest.raises(bngrad.UnavailableError, match=f"{served.target} shares no memory with this client: {why}"),
    ):
        client.fused_batch_norm_grad_v2(x, x, x[0, 0, 0], x[0, 0, 0], x[0, 0, 0])


def test_a_server_whose_endpoints_have_gone_is_asked_again(served: Server) -> None:
    directory = served.endpoints.local_directory

    def tell() -> None:
        served.endpoints.local_directory = "/gone" if served.infos == 1 else directory

    served.on_info = tell
    with bngrad.Client(served.target, transport="shared") as client:
        right(client, tensor(LARGE), served)
    assert served.ways == ["shared"]


def test_an_array_comes_from_the_server_that_has_taken_the_place_of_another_one(served: Server) -> None:
    directory = served.endpoints.local_directory
    with server() as before, bngrad.Client(served.target) as client:
        served.endpoints.local_directory = before.endpoints.local_directory
        client.fused_batch_norm_grad_v2(*inputs(1))
        before.local.close()
        before.sockets.close()
        served.endpoints.local_directory = directory
        assert is_shared(client, client.empty(LARGE))
    assert (before.ways, served.ways) == (["local"], [])


def test_shared_memory_that_another_call_found_lost_is_unavailable_rather_than_not_shared(served: Server) -> None:
    with bngrad.Client(served.target, transport="shared", retries=False) as client:
        right(client, tensor(SMALL), served)
        shared = shared_pool(client)
        assert shared is not None
        shared.close()
        with pytest.raises(bngrad.UnavailableError) as raised:
            right(client, tensor(LARGE), served)
    assert not isinstance(raised.value, NotSharedError)


def test_a_server_on_this_host_that_does_not_answer_is_unavailable_rather_than_not_shared(served: Server) -> None:
    served.local.close()  # its socket is still there
    with bngrad.Client(served.target, transport="shared", retries=False) as client:
        for make in (lambda: right(client, tensor(LARGE), served), lambda: client.empty(SMALL)):
            with pytest.raises(bngrad.UnavailableError, match="does not answer") as raised:
                make()
            assert not isinstance(raised.value, NotSharedError)


@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_a_call_whose_memory_comes_too_late_exceeds_its_deadline(
    served: Server, transport: Transport, tmp_path: Path
) -> None:
    (tmp_path / CALLS).symlink_to(Path(served.endpoints.local_directory, CALLS))
    served.endpoints.local_directory = str(tmp_path)
    x, stats = tensor(LARGE), np.ones(LARGE[-1], np.float32)
    with socket.socket(socket.AF_UNIX) as silent, bngrad.Client(served.target, transport=transport) as client:
        silent.bind(str(tmp_path / REGIONS))
        silent.listen()
        with pytest.raises(bngrad.DeadlineExceededError, match=r"timeout of 0\.3 s"):
            client.fused_batch_norm_grad_v2(x, x, stats, stats, stats, timeout=0.3)


def test_a_call_in_shared_memory_whose_connection_is_lost_is_repeated(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "_BLOCKED_S", 0.05)
    losses = 1

    def lose(way: str) -> None:
        nonlocal losses
        if losses:
            losses -= 1
            raise ConnectionError

    served.on_call = lose
    with bngrad.Client(served.target, transport="shared") as client:
        right(client, tensor(LARGE), served)
    assert served.ways == ["shared"]


def test_a_server_that_ends_a_lease_before_it_begins_is_unavailable_rather_than_not_shared(
    served: Server, tmp_path: Path
) -> None:
    (tmp_path / CALLS).symlink_to(Path(served.endpoints.local_directory, CALLS))
    served.endpoints.local_directory = str(tmp_path)

    def end_lease() -> None:
        sock, _ = ending.accept()
        with sock:
            assert sock.recv(1024)

    with (
        socket.socket(socket.AF_UNIX) as ending,
        ThreadPoolExecutor(1) as threads,
        bngrad.Client(served.target, transport="shared", retries=False) as client,
    ):
        ending.settimeout(SECONDS)
        ending.bind(str(tmp_path / REGIONS))
        ending.listen()
        ended = threads.submit(end_lease)
        with pytest.raises(bngrad.UnavailableError, match="the server closed the lease without an answer") as raised:
            client.empty(SMALL)
        ended.result(SECONDS)
    assert not isinstance(raised.value, NotSharedError)


def test_a_call_that_meets_a_full_queue_goes_another_way_and_keeps_the_shared_memory(
    served: Server, tmp_path: Path
) -> None:
    directory = Path(served.endpoints.local_directory)
    for name in (CALLS, REGIONS):
        (tmp_path / name).symlink_to(directory / name)
    served.endpoints.local_directory = str(tmp_path)
    with full_listener(str(tmp_path / "full")), bngrad.Client(served.target) as client:
        right(client, tensor(LARGE), served)
        shared = shared_pool(client)
        (tmp_path / CALLS).unlink()
        (tmp_path / CALLS).symlink_to(tmp_path / "full")
        served.local.cut()
        right(client, tensor(LARGE), served)
        assert shared_pool(client) is shared
    assert (served.ways, served.infos) == (["shared", "tcp"], 1)


def test_leases_that_ended_are_renewed(served: Server) -> None:
    with bngrad.Client(served.target) as client:
        x = located(client, LARGE)
        right(client, x, served)
        shared = shared_pool(client)
        assert shared is not None
        lease = shared._regions[0]._socket
        assert lease is not None
        lease.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: served.regions.kept_nbytes)  # for as long as x is used
        right(client, x, served)
        right(client, x, served)
        assert served.ways == ["shared"] * 3
        np.testing.assert_array_equal(x, tensor(LARGE))


@pytest.mark.parametrize("ends", ["timeout", "close"])
@pytest.mark.parametrize(("transport", "shape"), [("shared", LARGE), ("auto", SMALL), ("stream", LARGE)])
def test_stalled_calls_end(served: Server, transport: Transport, shape: tuple[int, ...], ends: str) -> None:
    arrived, released = threading.Event(), threading.Event()

    def hold(way: str) -> None:
        arrived.set()
        released.wait(SECONDS)

    with bngrad.Client(served.target, transport=transport) as client, ThreadPoolExecutor(1) as threads:
        right(client, tensor(shape), served)
        served.on_call = hold
        for timeout in (0.3, 10.0) if ends == "timeout" else (SECONDS,):  # the first call may arrive too late
            call = threads.submit(right, client, tensor(shape), served, timeout=timeout)
            if ends == "close":
                assert arrived.wait(SECONDS)
                client.close()
            error = bngrad.DeadlineExceededError if ends == "timeout" else bngrad.ClientClosedError
            told = f"timeout of {timeout} s" if ends == "timeout" else "was closed during the call"
            with pytest.raises(error, match=told):
                call.result(SECONDS)
            if arrived.is_set():
                break
        assert arrived.is_set()
        released.set()


@pytest.mark.parametrize("ends", ["timeout", "cancellation"])
@pytest.mark.parametrize("moment", ["on_arrival", "on_call"])
async def test_a_late_write_of_a_failed_call_reaches_no_other_array(served: Server, moment: str, ends: str) -> None:
    """Both if the server has started the call by then, and if it has not read it."""
    held, released = threading.Event(), threading.Event()

    def hold(way: str) -> None:
        if not held.is_set():
            held.set()
            released.wait(SECONDS)

    stats = np.ones(MEDIUM[-1], np.float32)
    async with bngrad.aio.Client(served.target, transport="shared") as client:
        x = await client.empty(MEDIUM)
        x[...] = tensor(MEDIUM)

        async def ask(timeout: float = SECONDS) -> None:
            await client.fused_batch_norm_grad_v2(x, x, stats, stats, stats, timeout=timeout)

        async def ask_in_vain(timeout: float) -> None:
            asked = asyncio.create_task(ask(timeout))
            if ends == "cancellation":
                assert await asyncio.to_thread(held.wait, SECONDS)
                asked.cancel()
            with pytest.raises((bngrad.DeadlineExceededError, asyncio.CancelledError)):
                await asked

        await ask()
        setattr(served, moment, hold)
        await ask_in_vain(0.3)
        if not held.is_set():  # on a busy machine the call may not arrive in time
            await ask_in_vain(SECONDS)
        for _ in range(10):  # releases what may leave quarantine
            await ask()
        gc.collect()
        arrays = [await client.empty(MEDIUM) for _ in range(10)]
        for array in arrays:
            array[...] = -1
        before = len(served.ways)
        released.set()
        until = time.monotonic() + SECONDS
        while len(served.ways) == before and time.monotonic() < until:
            await asyncio.sleep(0.01)
        served.local.close()  # waits for the write
        assert len(served.ways) == before + 1
        assert all((array == -1).all() for array in arrays)


def test_a_call_that_times_out_does_not_affect_other_calls(served: Server) -> None:
    def hold(way: str) -> None:
        time.sleep(0.02)

    with bngrad.Client(served.target, transport="shared") as client, ThreadPoolExecutor(4) as threads:
        right(client, tensor(MEDIUM), served)
        served.on_call = hold

        def time_out(number: int) -> None:
            with contextlib.suppress(bngrad.DeadlineExceededError):  # on a busy machine the deadline may pass unnoticed
                right(client, tensor(MEDIUM), served, timeout=0.01)

        done = [threads.submit(time_out, number) for number in range(20)]
        for number in range(20):
            right(client, tensor(MEDIUM) + number, served)
        for each in done:
            each.result(SECONDS)
    assert set(served.ways) == {"shared"}


async def test_a_cancelled_task_ends_its_call_and_loses_no_endpoint(served: Server) -> None:
    arrived, released = threading.Event(), threading.Event()

    def hold(way: str) -> None:
        arrived.set()
        released.wait(SECONDS)

    x, stats = tensor(LARGE), np.ones(32, np.float32)
    async with bngrad.aio.Client(served.target) as client:
        await client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
        served.on_call = hold
        call = asyncio.create_task(client.fused_batch_norm_grad_v2(x, x, stats, stats, stats))
        assert await asyncio.to_thread(arrived.wait, SECONDS)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        served.on_call = lambda way: None
        released.set()
        for _ in range(3):
            await client.fused_batch_norm_grad_v2(x, x, stats, stats, stats)
    assert set(served.ways) == {"shared"}
    assert served.infos == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda endpoints: setattr(endpoints, "stream_port", 2**31 - 1),
        lambda endpoints: setattr(endpoints, "stream_port", -1),
        lambda endpoints: setattr(endpoints, "local_directory", "/nowhere"),
        lambda endpoints: setattr(endpoints, "local_directory", "/" + "x" * 300),
        lambda endpoints: setattr(endpoints, "local_directory", "/dev/\0shm"),
    ],
)
@pytest.mark.parametrize("transport", ["auto", "stream"])
def test_malformed_endpoints_are_not_used(served: Server, transport: Transport, change: Callable[[Any], None]) -> None:
    change(served.endpoints)
    with bngrad.Client(served.target, transport=transport) as client:
        right(client, tensor(LARGE), served)
    assert len(served.ways) == 1


def test_a_stream_port_that_drops_packets_delays_no_call_and_is_logged_once(
    served: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connector, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(endpoints, "_BLOCKED_S", 0.2)
    served.endpoints.ClearField("local_directory")
    with full_listener() as listener, bngrad.Client(served.target) as client:
        served.endpoints.stream_port = listener.getsockname()[1]
        until = time.monotonic() + SECONDS
        while (served.infos < 3 or not caplog.records) and time.monotonic() < until:
            right(client, tensor(LARGE), served)
    assert set(served.ways) == {"grpc"}
    assert served.infos >= 3  # it was tried again
    (record,) = caplog.records
    assert f"calls go to {served.target} by grpcio" in record.message


def test_a_connection_that_takes_long_serves_later_calls(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "_TIMEOUT_S", SECONDS)
    served.endpoints.ClearField("local_directory")
    with socket.socket() as listener, bngrad.Client(served.target) as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        served.endpoints.stream_port = listener.getsockname()[1]
        with socket.create_connection(listener.getsockname()):
            right(client, tensor(LARGE), served)
            listener.accept()[0].close()
        late = Endpoint(listener, served.answer_on("late"))
        until = time.monotonic() + SECONDS
        while served.ways[-1] != "late" and time.monotonic() < until:
            right(client, tensor(LARGE), served)
        late.close()
    assert served.ways[0] == "grpc"
    assert served.ways[-1] == "late"
    assert served.infos == 1  # its address was not given up


def test_the_host_that_a_server_names_is_used_for_its_stream_port(served: Server) -> None:
    served.endpoints.ClearField("local_directory")
    with endpoint(served.answer_on("named"), host="127.0.0.2") as other, bngrad.Client(served.target) as client:
        host, served.endpoints.stream_port = str(other.address[0]), int(other.address[1])
        served.endpoints.stream_host = host
        right(client, tensor(LARGE), served)
    assert served.ways == ["named"]


def test_an_error_names_the_host_that_a_server_names_for_its_stream_port(served: Server) -> None:
    def fail(way: str) -> None:
        raise RpcError(13, "for a test")

    served.endpoints.ClearField("local_directory")
    served.on_arrival = fail
    with endpoint(served.answer_on("named"), host="127.0.0.2") as other, bngrad.Client(served.target) as client:
        host, port = str(other.address[0]), int(other.address[1])
        served.endpoints.stream_host, served.endpoints.stream_port = host, port
        with pytest.raises(bngrad.InternalError, match=f"^{host}:{port} "):
            right(client, tensor(LARGE), served)
