"""How calls and connections end, seen by a peer of raw bytes."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.unit.wire.http2.peers import HELLO, TIMEOUT_S, pair

from bngrad_wire.http2 import ClientConnection, ServerConnection, frames, set_timeout
from bngrad_wire.http2.errors import ErrorCode, RpcError, Status
from bngrad_wire.http2.frames import frame, goaway, rst_stream, settings, window_update
from bngrad_wire.http2.header_block import encode

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("content-type", "application/grpc")]
RESPONSE = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]
END = frames.END_HEADERS | frames.END_STREAM


def test_an_answer_is_read_though_its_server_resets_the_rest_of_the_call() -> None:
    """RFC 9113, section 8.1: such a reset, after a whole response, must not cost the client the response."""
    near, far = pair("unix")
    answer = frame(frames.HEADERS, frames.END_HEADERS, 1, encode(RESPONSE))
    answer += frame(frames.DATA, 0, 1, b"\0\0\0\0\5hello") + frame(frames.HEADERS, END, 1, encode(OK))
    with far, closing(ClientConnection(near, "localhost")) as connection:
        call = connection.call("/a/b")
        call.send_message(b"the first of many")
        far.sendall(settings({}) + answer + rst_stream(1, ErrorCode.NO_ERROR))
        assert not call.cancelled()
        call.send_message(b"not sent")
        assert call.read(call.receive_message() or 0) == b"hello"
        assert call.receive_message() is None
        assert connection.usable


def test_a_status_is_read_though_its_server_has_closed_the_connection() -> None:
    near, far = pair("unix")
    status = encode([*RESPONSE, ("grpc-status", "8"), ("grpc-message", "the server is full")])
    with closing(ClientConnection(near, "localhost")) as connection:
        call = connection.call("/a/b")
        call.send_message(b"the first of many")
        with far:
            far.sendall(settings({}) + frame(frames.HEADERS, END, 1, status))
            far.recv(65536)
        with pytest.raises(RpcError, match="the server is full") as raised:
            call.receive_message()
        assert raised.value.code == Status.RESOURCE_EXHAUSTED


def test_a_client_that_closes_names_no_stream_of_its_server() -> None:
    """The number in GOAWAY is that of the peer's last stream (RFC 9113, section 6.8), and a server opens none."""
    near, far = pair("unix")
    with far:
        with closing(ClientConnection(near, "localhost")) as connection:
            connection.call("/a/b").send_message(b"", end=True)
        sent = b"".join(iter(lambda: far.recv(65536), b""))
    assert sent.endswith(goaway(0, ErrorCode.NO_ERROR))


def test_a_connection_that_closes_amid_a_frame_sends_nothing_into_it() -> None:
    near, far = pair("unix")
    set_timeout(far, TIMEOUT_S)
    with near, closing(ServerConnection(far)) as server:
        server.blocking = False
        windows = window_update(0, 2**30) + settings({frames.INITIAL_WINDOW_SIZE: 2**30})
        near.sendall(HELLO + windows + frame(frames.HEADERS, END, 1, encode(REQUEST)))
        running = server.accept_nonblocking()
        assert running is not None
        running.send_message(b"x" * 2**22, more=True)
        running.end()
        assert server.outbound
        received = near.recv(200_000)  # which makes room
        server.close()
        received += b"".join(iter(lambda: near.recv(65536), b""))
    assert received.endswith(b"x" * 1000)
