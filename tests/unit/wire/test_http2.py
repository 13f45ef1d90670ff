from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import grpc
import pytest
from tests.unit.wire.http2_peers import (
    TIMEOUT_S,
    UNLIMITED,
    client,
    echo,
    grpcio_server,
    in_thread,
    listening,
    pair,
    serve,
    serve_until_gone,
    unary,
    unary_of,
)

from bngrad_wire.http2 import ClientConnection, PeerGoneError, RpcError, ServerCall, ServerConnection

SIZES = [0, 1, 5, 64 * 1024, 20 * 2**20]


# Both ends are this package's.


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_messages_of_any_size_arrive_whole_on_one_connection(kind: str) -> None:
    with client(kind) as connection:
        for size in [*SIZES, 3]:
            message = os.urandom(size)
            assert unary(connection, message) == message
            assert connection.usable


def test_a_message_is_the_concatenation_of_its_buffers_and_is_read_in_any_pieces() -> None:
    pieces = [os.urandom(size) for size in (0, 1, 70_000, 3, 0, 200_000, 16)] + [b"x"] * 2000
    whole = b"".join(pieces)
    with client() as connection:
        call = connection.call("/echo.Echo/echo")
        call.send_message(*(memoryview(piece) for piece in pieces), end=True)
        assert call.receive_message() == len(whole)
        read = call.read(10)
        large = bytearray(150_000)
        call.read_into(memoryview(large))
        assert call.remaining == len(whole) - 150_010
        read += large + call.read(call.remaining)
        assert read == whole
        assert call.receive_message() is None


def test_many_messages_of_a_call_arrive_in_order_and_the_unread_rest_of_one_is_skipped() -> None:
    with client() as connection:
        call = connection.call("/echo.Echo/echo")
        for number in range(100):
            call.send_message(bytes([number]) * (1 + number * 10), more=True)
        call.half_close()
        for number in range(100):
            assert call.receive_message() == 1 + number * 10
            assert call.read(1) == bytes([number])
        assert call.receive_message() is None
        assert call.receive_message() is None
        assert connection.usable


def test_many_calls_share_a_connection() -> None:
    with client() as connection:
        for number in range(500):
            assert unary(connection, b"%d" % number) == b"%d" % number


def test_a_message_cannot_be_read_past_its_end() -> None:
    with client() as connection:
        call = connection.call("/echo.Echo/echo")
        call.send_message(b"abc", end=True)
        assert call.receive_message() == 3
        with pytest.raises(ValueError, match="4 bytes wanted of a message that has 3 left"):
            call.read(4)
        assert call.read(3) == b"abc"


def test_a_status_brings_its_message_and_details_and_leaves_the_connection_usable() -> None:
    with client() as connection:
        for message in (b"", bytes(100_000)):
            with pytest.raises(RpcError) as error:
                unary(connection, message, "/echo.Echo/fail")
            assert (error.value.code, error.value.message) == (3, "naïve 100%\n")
            assert error.value.details == b"\x00details"
            assert connection.usable


def test_a_call_that_its_server_ends_unread_leaves_the_connection_usable() -> None:
    with client(answer=lambda call: call.end(8, "busy")) as connection:
        for _ in range(3):
            with pytest.raises(RpcError, match="busy"):
                unary(connection, bytes(5 * 2**20))
        call = connection.call("/a/b")
        call.send_message(b"not the last")
        with pytest.raises(RpcError, match="busy"):
            call.receive_message()
        assert connection.usable


def test_the_server_sees_path_deadline_and_metadata() -> None:
    seen: list[ServerCall] = []

    def answer(call: ServerCall) -> None:
        seen.append(call)
        echo(call)

    with client(answer=answer) as connection:
        call = connection.call("/a.B/c", timeout_s=1.5, metadata=[("x-one", "1"), ("x-two", "a"), ("x-two", "b")])
        call.send_message(b"", end=True)
        while call.receive_message() is not None:
            pass
        unary(connection)
    assert (seen[0].path, seen[0].timeout_s) == ("/a.B/c", 1.5)
    assert seen[0].metadata["x-one"] == "1"
    assert seen[0].metadata["x-two"] == "a,b"
    assert seen[1].timeout_s is None


@pytest.mark.parametrize("seconds", [1e-9, 0.001, 0.25, 100, 3600, 1e6, 1e12])
def test_any_deadline_arrives_close_below_what_was_given(seconds: float) -> None:
    seen: list[float | None] = []

    def answer(call: ServerCall) -> None:
        seen.append(call.timeout_s)
        echo(call)

    with client(answer=answer) as connection:
        call = connection.call("/a/b", timeout_s=seconds)
        call.send_message(b"", end=True)
        assert call.receive_message() == 0
        assert call.receive_message() is None
    assert seen[0] == pytest.approx(min(seconds, 99_999_999), rel=1e-6)


def test_a_cancelled_call_is_seen_by_the_server_and_leaves_the_connection_usable() -> None:
    seen = threading.Event()

    def answer(call: ServerCall) -> None:
        if call.path == "/wait":
            call.receive_message()
            assert not call.cancelled()
            call.send_message(b"begun")
            while not call.cancelled():
                time.sleep(0.001)
            seen.set()
            with pytest.raises(RpcError, match="CANCEL"):
                call.send_message(b"too late")
            call.end()
        else:
            echo(call)

    with client(answer=answer) as connection:
        call = connection.call("/wait")
        call.send_message(b"x")
        call.receive_message()
        assert not connection.usable
        call.cancel()
        assert seen.wait(TIMEOUT_S)
        assert connection.usable
        assert unary(connection, b"next") == b"next"
        call = connection.call("/never/sent")
        call.cancel()
        assert unary(connection, b"next") == b"next"


def test_looking_for_a_cancellation_loses_nothing_that_has_arrived() -> None:
    def answer(call: ServerCall) -> None:
        while not call.receive_buffer and not call.cancelled():
            time.sleep(0.001)
        assert not call.cancelled()
        echo(call)

    with client(answer=answer) as connection:
        message = os.urandom(300_000)
        call = connection.call("/a/b")
        call.send_message(b"first", more=True)
        call.send_message(message, end=True)
        assert call.receive_message() == 5
        assert call.receive_message() == len(message)
        assert call.read(len(message)) == message


def test_a_client_that_has_gone_counts_as_cancelled() -> None:
    begun, seen = threading.Event(), threading.Event()

    def answer(call: ServerCall) -> None:
        begun.set()
        while not call.cancelled():
            time.sleep(0.001)
        seen.set()
        with pytest.raises(PeerGoneError):
            call.end()
        raise PeerGoneError

    near, far = pair("unix")
    with in_thread(serve_until_gone, far, answer):
        connection = ClientConnection(near, "localhost")
        connection.call("/a/b").send_message(b"", end=True)
        assert begun.wait(TIMEOUT_S)
        connection.close()
        assert seen.wait(TIMEOUT_S)


def test_a_timeout_raises_and_a_call_that_timed_out_can_be_cancelled() -> None:
    release = threading.Event()

    def answer(call: ServerCall) -> None:
        if call.path == "/slow":
            release.wait(TIMEOUT_S)
        echo(call)

    near, far = pair("unix")
    with in_thread(serve, far, answer):
        near.settimeout(0.05)
        connection = ClientConnection(near, "localhost")
        call = connection.call("/slow")
        call.send_message(b"", end=True)
        with pytest.raises(TimeoutError):
            call.receive_message()
        assert not connection.usable
        call.cancel()
        release.set()
        near.settimeout(TIMEOUT_S)
        assert connection.usable
        assert unary(connection, b"x") == b"x"
        connection.close()


def server_hello() -> bytes:
    near, far = socket.socketpair()
    with near, far:
        ServerConnection(far)
        return near.recv(1000)


SERVER_HELLO = server_hello()


def test_a_connection_whose_sending_timed_out_is_unusable() -> None:
    near, far = pair("unix")
    with far:
        near.settimeout(0.05)
        connection = ClientConnection(near, "localhost")
        far.sendall(SERVER_HELLO)
        call = connection.call("/a/b")
        with pytest.raises(TimeoutError):
            call.send_message(bytes(20 * 2**20))
        call.cancel()
        assert not connection.usable
        with pytest.raises(PeerGoneError, match="sending timed out"):
            connection.call("/a/b")
        connection.close()


PING = b"\x00\x00\x08\x06\x00" + bytes(4 + 8)


@pytest.mark.parametrize("direction", ["it reads", "it sends"])
def test_a_peer_that_does_a_little_now_and_then_is_given_up_in_time(direction: str) -> None:
    near, far = pair("tcp")
    given_up = threading.Event()

    def dribble() -> None:
        for _ in range(1000):
            if given_up.wait(0.01):
                return
            if direction == "it reads":
                far.recv(4096)
            else:
                far.send(PING)
        pytest.fail("nobody gave up")

    near.settimeout(TIMEOUT_S)  # of each wait, so never reached
    connection = ClientConnection(near, "localhost")
    with far, in_thread(dribble):
        far.sendall(SERVER_HELLO)
        connection.io.deadline = time.monotonic() + 0.2
        call = connection.call("/a/b")
        act = partial(call.send_message, bytes(20 * 2**20)) if direction == "it reads" else call.receive_message
        with pytest.raises(TimeoutError):
            act()
        given_up.set()
        assert not connection.usable
        connection.close()


@pytest.mark.parametrize("end", [lambda sock: ClientConnection(sock, "localhost"), ServerConnection])
def test_a_connection_to_a_peer_that_has_gone_closes_its_socket(end: Callable[[socket.socket], object]) -> None:
    near, far = pair("unix")
    far.close()
    with pytest.raises(PeerGoneError):
        end(near)
    assert near.fileno() == -1


def test_an_idle_server_may_time_out_and_accept_again() -> None:
    near, far = pair("unix")
    far.settimeout(0.01)
    server = ServerConnection(far)
    with pytest.raises(TimeoutError):
        server.accept()
    connection = ClientConnection(near, "localhost")
    asked = connection.call("/a/b")
    asked.send_message(b"hello", end=True)
    call = server.accept()
    assert call is not None
    echo(call)
    assert asked.receive_message() == 5
    assert asked.receive_message() is None
    with pytest.raises(TimeoutError):
        server.accept()
    connection.close()
    assert server.accept() is None
    server.close()


def test_goaway_lets_the_running_call_end_and_takes_no_other() -> None:
    near, far = pair("unix")
    server = ServerConnection(far)
    connection = ClientConnection(near, "localhost")
    running = connection.call("/a/b")
    running.send_message(b"x", end=True)
    call = server.accept()
    assert call is not None
    server.goaway()
    echo(call)
    assert server.accept() is None
    assert running.receive_message() == 1
    assert running.receive_message() is None
    assert not connection.usable
    with pytest.raises(PeerGoneError, match="takes no more calls"):
        connection.call("/a/b")
    server.close()
    connection.close()


def test_a_server_that_has_closed_makes_the_connection_unusable_before_the_next_call() -> None:
    near, far = pair("tcp")
    connection = ClientConnection(near, "localhost")
    assert connection.usable
    far.close()
    deadline = time.monotonic() + TIMEOUT_S
    while connection.usable:
        assert time.monotonic() < deadline
    connection.close()


def test_wrong_use_is_refused() -> None:
    with client() as connection:
        call = connection.call("/a/b")
        with pytest.raises(PeerGoneError, match="the previous call is unfinished"):
            connection.call("/a/b")
        call.send_message(b"", end=True)
        with pytest.raises(RuntimeError, match="sending side"):
            call.send_message(b"")
        call.cancel()
    with pytest.raises(PeerGoneError, match="closed"):
        connection.call("/a/b")


# grpcio calls this package's server.


def test_grpcio_calls_the_server_with_messages_of_any_size() -> None:
    with listening() as address, grpc.insecure_channel(address, options=UNLIMITED) as channel:
        call = unary_of(channel, "/echo.Echo/echo")
        for size in [*SIZES, 3]:
            message = os.urandom(size)
            assert call(message, timeout=TIMEOUT_S) == message


def test_grpcio_streams_to_the_server_both_ways() -> None:
    messages = [os.urandom(size) for size in (1, 2**20, 0, 5 * 2**20, 7)] * 2
    with listening() as address, grpc.insecure_channel(address, options=UNLIMITED) as channel:
        stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream("/echo.Echo/echo")
        for _ in range(2):
            assert list(stream(iter(messages), timeout=TIMEOUT_S)) == messages


def test_grpcio_reads_the_servers_status() -> None:
    with listening() as address, grpc.insecure_channel(address) as channel:
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as error:
                unary_of(channel, "/echo.Echo/fail")(b"x", timeout=TIMEOUT_S)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.value.details() == "naïve 100%\n"
            details = [item.value for item in error.value.trailing_metadata() if item.key == "grpc-status-details-bin"]
            assert details == [b"\x00details"]


def test_grpcio_reads_a_status_that_comes_before_it_has_sent_all() -> None:
    def answer(call: ServerCall) -> None:
        call.end(8, "busy")

    with listening(answer) as address, grpc.insecure_channel(address, options=UNLIMITED) as channel:
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as error:
                unary_of(channel, "/a/b")(bytes(5 * 2**20), timeout=TIMEOUT_S)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_grpcios_compressed_message_is_refused_as_unimplemented() -> None:
    with listening() as address, grpc.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
        with pytest.raises(grpc.RpcError) as error:
            unary_of(channel, "/a/b")(bytes(1000), timeout=TIMEOUT_S)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_grpcios_deadline_and_cancellation_reach_the_server() -> None:
    deadlines: list[float | None] = []
    begun, cancelled = threading.Event(), threading.Event()

    def answer(call: ServerCall) -> None:
        deadlines.append(call.timeout_s)
        call.receive_message()
        begun.set()
        while not call.cancelled():
            time.sleep(0.001)
        cancelled.set()
        call.end()

    with listening(answer) as address, grpc.insecure_channel(address) as channel:
        future = unary_of(channel, "/a/b").future(b"x", timeout=60)
        assert begun.wait(TIMEOUT_S)
        future.cancel()
        assert cancelled.wait(TIMEOUT_S)
        cancelled.clear()
        for timeout in (1, 10):  # on a busy machine the first may pass before the call is there
            with pytest.raises(grpc.RpcError) as error:
                unary_of(channel, "/a/b")(b"x", timeout=timeout)
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if len(deadlines) > 1:
                break
        assert cancelled.wait(TIMEOUT_S)
    assert deadlines[0] == pytest.approx(60, abs=TIMEOUT_S)
    assert deadlines[1] == pytest.approx(timeout, abs=timeout)


# This package's client calls grpcio's server.


def _echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


def test_the_client_calls_grpcio_with_messages_of_any_size() -> None:
    with grpcio_server(_echo) as connection:
        for size in [*SIZES, 3]:
            message = os.urandom(size)
            assert unary(connection, message) == message
            assert connection.usable


def test_the_client_sends_all_it_has_before_it_reads_grpcios_answers() -> None:
    messages = [os.urandom(2**20) for _ in range(10)]
    with grpcio_server(_echo) as connection:
        call = connection.call("/a/b")
        for message in messages:
            call.send_message(message)
        call.half_close()
        for message in messages:
            assert call.receive_message() == len(message)
            assert call.read(len(message)) == message
        assert call.receive_message() is None


def test_the_client_reads_grpcios_status_and_leaves_the_connection_usable() -> None:
    def fail(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield next(requests)
        context.set_trailing_metadata((("grpc-status-details-bin", b"\x00details"),))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "naïve 100%\n")

    with grpcio_server(fail) as connection:
        for size in (1, 5 * 2**20):
            with pytest.raises(RpcError) as error:
                unary(connection, bytes(size))
            assert (error.value.code, error.value.message) == (3, "naïve 100%\n")
            assert error.value.details == b"\x00details"
            assert connection.usable


def test_the_clients_deadline_metadata_and_cancellation_reach_grpcio() -> None:
    seen: list[object] = []
    cancelled = threading.Event()

    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        seen.append(context.time_remaining())
        seen.append(dict(context.invocation_metadata()).get("x-one"))
        context.add_callback(cancelled.set)
        yield from requests

    with grpcio_server(answer) as connection:
        call = connection.call("/a/b", timeout_s=60, metadata=[("x-one", "1")])
        call.send_message(b"x")
        assert call.receive_message() == 1
        call.cancel()
        assert cancelled.wait(TIMEOUT_S)
        assert connection.usable
        assert unary(connection, b"y") == b"y"
    assert seen[0] == pytest.approx(60, abs=TIMEOUT_S)
    assert seen[1] == "1"
