"""What correct clients send in small messages, which a peer that counts frames must not take for a flood."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.raw_http2 import is_closed
from tests.unit.wire.http2.peers import HELLO, TIMEOUT_S, echo, in_thread

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import chunks
from bngrad_wire.http2 import ProtocolError, ServerCall, ServerConnection, frames
from bngrad_wire.http2.header_block import encode

COUNT = 5000
"""Far more frames than a peer that is not trusted may send while the test runs."""
REQUEST = encode([(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("content-type", "application/grpc")])
BEGUN = HELLO + frames.window_update(0, 2**20) + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, REQUEST)
END = frames.frame(frames.DATA, frames.END_STREAM, 1, b"")


def data(message: bytes) -> bytes:
    return frames.frame(frames.DATA, 0, 1, b"\0" + len(message).to_bytes(4, "big") + message)


def chunk(elements: bytes) -> bytes:
    return data(pb.ExchangeRequest(chunk=elements).SerializeToString())


@pytest.fixture
def peer() -> Iterator[tuple[socket.socket, ServerConnection]]:
    """A client's socket, and the server's end, which allows 100 frames a second that move no call forward."""
    near, far = socket.socketpair()
    near.settimeout(TIMEOUT_S)
    far.settimeout(TIMEOUT_S)
    with near, closing(ServerConnection(far)) as connection:
        connection.distrust()
        yield near, connection


def accepted(connection: ServerConnection) -> ServerCall:
    call = connection.accept()
    assert call is not None
    return call


def test_each_message_of_an_answer_earns_frames(peer: tuple[socket.socket, ServerConnection]) -> None:
    near, connection = peer
    with in_thread(near.sendall, BEGUN + data(b"hello") * COUNT + END), in_thread(is_closed, near):
        echo(accepted(connection))
        connection.close()


def test_each_chunk_that_is_taken_earns_its_frame(peer: tuple[socket.socket, ServerConnection]) -> None:
    near, connection = peer
    target = bytearray(COUNT)
    with in_thread(near.sendall, BEGUN + chunk(b"x") * COUNT):
        chunks.receive(accepted(connection), chunks.REQUEST_CHUNK, memoryview(target))
    assert target == b"x" * COUNT


def test_chunks_that_wait_to_be_taken_are_no_flood(peer: tuple[socket.socket, ServerConnection]) -> None:
    """A thread that waits for a worker looks whether its client has cancelled the call, and reads ahead."""
    near, connection = peer
    target = bytearray(COUNT)
    with in_thread(near.sendall, BEGUN + chunk(b"x") * COUNT):
        call = accepted(connection)
        assert not any(call.cancelled() for _ in range(100))
        chunks.receive(call, chunks.REQUEST_CHUNK, memoryview(target))
    assert target == b"x" * COUNT


def test_empty_chunks_earn_nothing(peer: tuple[socket.socket, ServerConnection]) -> None:
    near, connection = peer
    near.sendall(BEGUN + chunk(b"") * 1000)
    with pytest.raises(ProtocolError, match="more than 100 frames within a second"):
        chunks.receive(accepted(connection), chunks.REQUEST_CHUNK, memoryview(bytearray(1)))
