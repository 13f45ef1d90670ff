"""Calls between this package and grpcio, in both directions."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from tests.unit.wire.http2.peers import (
    SIZES,
    TIMEOUT_S,
    UNLIMITED,
    echo,
    grpcio_server,
    lending_echo,
    listening,
    unary,
    unary_of,
)

from bngrad_wire.http2 import RpcError, ServerCall


@pytest.mark.parametrize("answer", [echo, lending_echo])
def test_grpcio_calls_the_server_with_messages_of_any_size(answer: Callable[[ServerCall], None]) -> None:
    with listening(answer) as address, grpc.insecure_channel(address, options=UNLIMITED) as channel:
        call = unary_of(channel, "/echo.Echo/echo")
        for size in [*SIZES, 3]:
            message = os.urandom(size)
            assert call(message, timeout=TIMEOUT_S) == message


@pytest.mark.parametrize("answer", [echo, lending_echo])
def test_grpcio_streams_to_the_server_both_ways(answer: Callable[[ServerCall], None]) -> None:
    messages = [os.urandom(size) for size in (1, 2**20, 0, 5 * 2**20, 7)] * 2
    with listening(answer) as address, grpc.insecure_channel(address, options=UNLIMITED) as channel:
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


def test_blanks_around_metadata_and_messages_of_statuses_come_from_grpcio_and_reach_it() -> None:
    """Which RFC 9113 forbids (section 8.2.1), but gRPC does not."""
    blanks, message = (("x-one", " 1"), ("x-two", "2 ")), "  all is lost "
    seen: list[dict[str, str]] = []

    def answer(call: ServerCall) -> None:
        seen.append(dict(call.metadata))
        call.end(13, message)

    def fail(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.INTERNAL, message)

    with (
        listening(answer) as address,
        grpc.insecure_channel(address) as channel,
        pytest.raises(grpc.RpcError) as theirs,
    ):
        unary_of(channel, "/a/b")(b"x", timeout=TIMEOUT_S, metadata=blanks)
    assert set(blanks) <= seen[0].items()
    assert (theirs.value.code(), theirs.value.details()) == (grpc.StatusCode.INTERNAL, message)
    with grpcio_server(fail) as connection, pytest.raises(RpcError) as ours:
        unary(connection)
    assert (ours.value.code, ours.value.message) == (13, message)


def test_a_compressed_message_of_grpcio_is_refused_as_unimplemented() -> None:
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
