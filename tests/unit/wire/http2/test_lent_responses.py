"""A server lends the memory of large responses to clients of its user, and has it back once they have read it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from tests.unit.wire.http2.peers import TIMEOUT_S, client, in_thread, pair, serve_until_gone, unary

from bngrad_wire.http2 import RpcError, ServerCall, ServerConnection, frames, set_timeout
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.header_block import encode

NBYTES = 8 * 2**20
CALL = [(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("content-type", "application/grpc")]


class Lender:
    """Answers calls with memory that it changes as soon as it may.

    Attributes:
        memory: The memory.
        has_it_back: Set once it may be changed.
        failure: What the last answer raised.
    """

    def __init__(self, nbytes: int = NBYTES, *, lends: bool = True) -> None:
        self.memory = np.zeros(nbytes, np.uint8)
        self.has_it_back = threading.Event()
        self.failure: BaseException | None = None
        self._lends = lends

    def answer(self, call: ServerCall) -> None:
        while call.receive_message() is not None:
            pass
        call.lends_memory = self._lends
        self.memory[:] = 0
        self.has_it_back.clear()
        try:
            call.send_message(self.memory.data, more=True)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.has_it_back.set()
        self.memory[:] = 2
        call.end()


def test_the_client_reads_the_servers_memory_and_the_server_waits_until_it_has() -> None:
    lender = Lender()
    with client("tcp", lender.answer) as connection:
        for _ in range(3):
            call = connection.call("/a/b")
            call.send_message(b"", end=True)
            size = call.receive_message()
            assert size == NBYTES
            lender.memory[-2000:-1000] = 1  # the last bytes, a frame of their own, may have been copied by now
            assert not lender.has_it_back.wait(0.1)
            expected = bytes(NBYTES - 2000) + b"\1" * 1000 + bytes(1000)
            assert call.read(size) == expected
            assert call.receive_message() is None
            assert lender.has_it_back.is_set()


def test_a_client_that_cancels_amid_a_response_lets_the_server_go_on_by_its_next_call() -> None:
    lender = Lender()  # the sockets may hold less, so that the server waits until the rest is read
    with client("tcp", lender.answer) as connection:
        call = connection.call("/a/b")
        call.send_message(b"", end=True)
        assert call.receive_message() == NBYTES
        call.cancel()
        assert unary(connection) == bytes(NBYTES)
        assert isinstance(lender.failure, RpcError)


class RawClient:
    """A client that reads frame by frame, and answers nothing by itself."""

    def __init__(self, sock: socket.socket, max_frame_nbytes: int = frames.LARGEST_FRAME_SIZE) -> None:
        self.sock = sock
        self.file = sock.makefile("rb")
        settings = {frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW, frames.MAX_FRAME_SIZE: max_frame_nbytes}
        opened = frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
        sock.sendall(frames.PREFACE + frames.settings(settings) + opened)

    def close(self) -> None:
        self.file.close()

    def call(self, stream_id: int) -> None:
        opening = frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, encode(CALL))
        self.sock.sendall(opening + frames.frame(frames.DATA, frames.END_STREAM, stream_id, bytes(5)))

    def next(self, kind: int) -> tuple[int, bytes]:
        """Returns the flags and content of the next frame of a kind, and forgets those before it."""
        return next((flags, content) for found, flags, content in self.frames() if found == kind)

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields kind, flags and content of the next frames, until the connection or the last call ends."""
        while len(header := self.file.read(frames.HEADER_NBYTES)) == frames.HEADER_NBYTES:
            length, kind, flags, _ = frames.parse_header(header, 0)
            yield kind, flags, self.file.read(length)
            if kind == frames.HEADERS and flags & frames.END_STREAM:
                return

    def answer_ping(self, content: bytes) -> None:
        self.sock.sendall(frames.frame(frames.PING, frames.ACK, 0, content))


@contextmanager
def raw_client(lender: Lender, max_frame_nbytes: int = frames.LARGEST_FRAME_SIZE) -> Iterator[RawClient]:
    near, far = pair("tcp")
    with in_thread(serve_until_gone, far, lender.answer), near, closing(RawClient(near, max_frame_nbytes)) as raw:
        yield raw


def test_a_client_that_takes_frames_of_a_middle_size_gets_the_memory_as_it_was() -> None:
    """They are fewer than are sent by themselves, and the end of the response follows."""
    lender = Lender(5 * 2**20)
    with raw_client(lender, 2**21) as raw:
        raw.call(1)
        content = b""
        for kind, _, data in raw.frames():
            if kind == frames.DATA:
                content += data
            elif kind == frames.PING:
                raw.answer_ping(data)
        assert content[5:] == bytes(5 * 2**20)


def test_the_trailers_come_once_the_client_has_answered_the_ping() -> None:
    lender = Lender()
    with raw_client(lender) as raw:
        raw.call(1)
        assert raw.next(frames.HEADERS)[0] == frames.END_HEADERS
        _, ping = raw.next(frames.PING)
        raw.answer_ping(b"not this")
        assert not lender.has_it_back.wait(0.1)
        raw.answer_ping(ping)
        assert raw.next(frames.HEADERS)[0] & frames.END_STREAM
        assert lender.has_it_back.is_set()


def test_the_answer_to_the_ping_of_a_call_that_was_reset_is_not_that_of_the_next() -> None:
    lender = Lender()
    with raw_client(lender) as raw:
        raw.call(1)
        _, first = raw.next(frames.PING)
        raw.sock.sendall(frames.rst_stream(1, ErrorCode.CANCEL))
        assert lender.has_it_back.wait(TIMEOUT_S)
        raw.call(3)
        _, second = raw.next(frames.PING)
        raw.answer_ping(first)
        assert not lender.has_it_back.wait(0.1)
        raw.answer_ping(second)
        assert lender.has_it_back.wait(TIMEOUT_S)


def test_after_a_response_that_was_reset_midway_a_small_one_waits_for_nothing() -> None:
    """It may be sent by an event loop, which must not wait."""
    lender = Lender(64 * 2**20)  # more than the sockets hold

    def answer(call: ServerCall) -> None:
        if not lender.has_it_back.is_set():
            lender.answer(call)
        call.receive_message()
        call.send_message(b"small")
        call.end()

    near, far = pair("tcp")
    with in_thread(serve_until_gone, far, answer), near, closing(RawClient(near)) as raw:
        raw.call(1)
        raw.next(frames.DATA)
        raw.sock.sendall(frames.rst_stream(1, ErrorCode.CANCEL))
        raw.call(3)
        received = list(raw.frames())
        assert sum(len(content) for kind, _, content in received if kind == frames.DATA) < lender.memory.nbytes
        assert frames.PING not in [kind for kind, _, _ in received]


@pytest.mark.parametrize(("nbytes", "lends"), [(NBYTES, False), (3 * 2**20, True)], ids=["not allowed", "small"])
def test_no_ping_is_sent_where_the_memory_was_copied(nbytes: int, lends: bool) -> None:
    lender = Lender(nbytes, lends=lends)
    with raw_client(lender) as raw:
        raw.call(1)
        received = list(raw.frames())
        assert sum(len(content) for kind, _, content in received if kind == frames.DATA) > nbytes
        assert frames.PING not in [kind for kind, _, _ in received]


@pytest.mark.parametrize("stall", ["it reads, and does not answer", "it reads nothing"])
def test_a_client_that_stalls_gets_no_trailers(stall: str) -> None:
    near, far = pair("tcp")
    with near, closing(ServerConnection(far)) as server, closing(RawClient(near)) as raw:
        raw.call(1)
        set_timeout(far, TIMEOUT_S)
        call = server.accept()
        assert call is not None
        while call.receive_message() is not None:
            pass
        set_timeout(far, 0.2)
        call.lends_memory = True
        with in_thread(send_to_a_client_that_stalls, call):
            if stall == "it reads, and does not answer":
                raw.next(frames.PING)
        server.close()
        assert not any(kind == frames.HEADERS and flags & frames.END_STREAM for kind, flags, _ in raw.frames())


def send_to_a_client_that_stalls(call: ServerCall) -> None:
    with pytest.raises(TimeoutError):
        call.send_message(bytes(NBYTES))
