"""What RFC 9113 and RFC 7541 demand of a server: the cases of h2spec that this package once failed, and h2spec itself.

h2spec is run where it is on the PATH, or where H2SPEC names it. With Debian's packages alone it is built so, from a
clone of github.com/summerwind/h2spec in GOPATH/src/github.com/summerwind:

    apt-get install golang-go golang-golang-x-net-dev golang-github-fatih-color-dev golang-github-spf13-cobra-dev
    GO111MODULE=off GOPATH=$GOPATH:/usr/share/gocode go build -o h2spec ./cmd/h2spec
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial

import pytest
from tests.unit.wire.http2.peers import HELLO, TIMEOUT_S, echo, pair

from bngrad_wire.http2 import (
    MultiplexedConnection,
    RpcError,
    ServerCall,
    ServerConnection,
    Uploads,
    frames,
    set_timeout,
)
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.frames import frame, parse_header, window_update
from bngrad_wire.http2.header_block import encode

H2SPEC = os.environ.get("H2SPEC") or shutil.which("h2spec")
H2SPEC_CASES = 147

END_HEADERS, END = frames.END_HEADERS, frames.END_HEADERS | frames.END_STREAM
METHOD, SCHEME, PATH = (":method", "POST"), (":scheme", "http"), (":path", "/a/b")
PSEUDO = [METHOD, SCHEME, PATH]
GRPC = ("content-type", "application/grpc")
CALL, GET = [*PSEUDO, GRPC], [(":method", "GET"), SCHEME, PATH]
headers, data = partial(frame, frames.HEADERS), partial(frame, frames.DATA)


def opening(fields: list[tuple[str, str]], *, end: bool = True, stream_id: int = 1) -> bytes:
    return headers(END if end else END_HEADERS, stream_id, encode(fields))


def priority_of(stream_id: int) -> bytes:
    return frames.UINT32.pack(stream_id) + b"\x10"


class Loop:
    """An event loop that is the calling thread."""

    is_current = True

    def call_soon(self, callback: Callable[[], None]) -> None:
        callback()


def serving(sock: socket.socket, *, several: bool) -> ServerConnection:
    """A connection that carries a call at a time, or from its beginning several."""
    set_timeout(sock, TIMEOUT_S)
    if not several:
        return ServerConnection(sock)
    connection = MultiplexedConnection(sock)
    connection._loop, connection._uploads = Loop(), Uploads(100, 2**23)
    connection.outbound.append(frames.settings({frames.MAX_CONCURRENT_STREAMS: 100}))
    return connection


def errors(*steps: bytes, several: bool = False) -> dict[int, ErrorCode]:
    """Returns the errors that a server answers when it gets these bytes one after the other: by stream, 0 for all."""
    near, far = pair("unix")
    near.settimeout(0)
    answer = bytearray()
    with near, closing(serving(far, several=several)) as server:
        server.blocking = False
        with suppress(ConnectionError):
            for step in (HELLO, *steps):
                near.sendall(step)
                run_turns(server)
        with suppress(BlockingIOError, ConnectionError):
            while chunk := near.recv(65536):
                answer += chunk
    return dict(errors_in(bytes(answer)))


def run_turns(server: ServerConnection) -> None:
    """Does what an event loop does for a connection."""
    while True:
        if isinstance(server, MultiplexedConnection):
            server.read()
            for lane in list(server._lanes()):
                if isinstance(lane.stream, ServerCall):
                    answer(lane.stream)
                if lane.stream is None:
                    server.forget(lane, lane._stream_id)
        elif (call := server.accept_nonblocking()) is not None:
            answer(call)
        server.flush()
        if not server.has_pending_input:
            return


def answer(call: ServerCall) -> None:
    if call.is_fully_received or call.failure is not None:
        try:
            echo(call)
        except RpcError as error:
            call.end(error.code, error.message)


def errors_in(answer: bytes) -> Iterator[tuple[int, ErrorCode]]:
    offset = 0
    while offset < len(answer):
        length, kind, _, stream_id = parse_header(answer, offset)
        payload = answer[offset + frames.HEADER_NBYTES :]
        if kind == frames.RST_STREAM:
            yield stream_id, ErrorCode(frames.UINT32.unpack_from(payload)[0])
        elif kind == frames.GOAWAY and (code := frames.UINT32.unpack_from(payload, 4)[0]):
            yield 0, ErrorCode(code)
        offset += frames.HEADER_NBYTES + length


MALFORMED = {
    "upper case": [*PSEUDO, GRPC, ("X-TEST", "ok")],
    "space in a name": [*PSEUDO, GRPC, ("x test", "ok")],
    "not ASCII": [*PSEUDO, GRPC, ("x-tést", "ok")],
    "line break": [*PSEUDO, GRPC, ("x-test", "a\nb")],
    "line break in a name": [*PSEUDO, GRPC, ("x\ntest", "a")],
    "unknown pseudo-header": [*PSEUDO, (":test", "ok"), GRPC],
    "response's pseudo-header": [*PSEUDO, (":status", "200"), GRPC],
    "pseudo-header at the end": [METHOD, SCHEME, GRPC, PATH],
    "connection": [*PSEUDO, GRPC, ("connection", "keep-alive")],
    "te": [*PSEUDO, GRPC, ("te", "trailers, deflate")],
    "empty path": [METHOD, SCHEME, (":path", ""), GRPC],
    "no method": [SCHEME, PATH, GRPC],
    "no scheme": [METHOD, PATH, GRPC],
    "no path": [METHOD, SCHEME, GRPC],
    "two methods": [METHOD, *PSEUDO, GRPC],
    "two schemes": [SCHEME, *PSEUDO, GRPC],
    "two paths": [PATH, *PSEUDO, GRPC],
    "content-length of nothing": [*PSEUDO, GRPC, ("content-length", "1")],
    "content-length without a number": [*PSEUDO, GRPC, ("content-length", "-1")],
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_request_is_reset_alone(fields: list[tuple[str, str]]) -> None:
    assert errors(opening(fields), opening(CALL, stream_id=3)) == {1: ErrorCode.PROTOCOL_ERROR}
    assert errors(opening(fields, end=False), data(0, 1, b"late"), opening(CALL, stream_id=3)).keys() == {1}


ENDED, BEGUN = opening(CALL), opening(CALL, end=False)
CANCEL = frames.rst_stream(1, ErrorCode.CANCEL)
TEN = [*CALL, ("content-length", "10")]
OTHER_TEN = [*PSEUDO, ("content-length", "10")]
CLOSED, WRONG = {0: ErrorCode.STREAM_CLOSED}, {0: ErrorCode.PROTOCOL_ERROR}
RESET = {1: ErrorCode.PROTOCOL_ERROR}
CASES = {
    "DATA after the end": ([ENDED, data(1, 1, b"test")], CLOSED),
    "DATA after the end of another request": ([opening(GET), data(1, 1, b"test")], CLOSED),
    "DATA with the end": ([ENDED + data(1, 1, b"test")], CLOSED),
    "HEADERS after the end": ([ENDED, ENDED], CLOSED),
    "CONTINUATION after the end": ([ENDED, frame(frames.CONTINUATION, 4, 1, b"")], WRONG),
    "DATA after RST_STREAM": ([BEGUN + CANCEL, data(1, 1, b"test")], CLOSED),
    "HEADERS after RST_STREAM": ([BEGUN + CANCEL, ENDED], CLOSED),
    "smaller stream": ([opening(CALL, stream_id=5), opening(CALL, stream_id=3)], WRONG),
    "two streams": ([BEGUN, opening(CALL, stream_id=3)], {3: ErrorCode.REFUSED_STREAM}),
    "two other streams": (
        [frames.settings({4: 0}), opening(GET), opening(GET, stream_id=3)],
        {3: ErrorCode.REFUSED_STREAM},
    ),
    "HEADERS of a stream that depends on itself": (
        [headers(END | frames.HAS_PRIORITY, 1, priority_of(1) + encode(CALL))],
        WRONG,
    ),
    "PRIORITY of a stream that depends on itself": ([frame(frames.PRIORITY, 0, 3, priority_of(3))], WRONG),
    "DATA that is too long": ([BEGUN, data(0, 1, bytes(2**14 + 1))], {0: ErrorCode.FRAME_SIZE_ERROR}),
    "HEADERS that are too long": ([headers(END, 1, bytes(2**14 + 1))], {0: ErrorCode.FRAME_SIZE_ERROR}),
    "CONTINUATION that is too long": (
        [headers(0, 1, encode(CALL)), frame(frames.CONTINUATION, 4, 1, bytes(2**14 + 1))],
        {0: ErrorCode.FRAME_SIZE_ERROR},
    ),
    "DATA that is too long, of a call that has arrived whole": (
        [BEGUN + data(1, 1, b"\0\0\0\0\5hello"), opening(CALL, end=False, stream_id=3) + data(1, 3, bytes(2**14 + 1))],
        {0: ErrorCode.FRAME_SIZE_ERROR},
    ),
    "window of a stream too large": ([BEGUN, window_update(1, 2**31 - 1)], {1: ErrorCode.FLOW_CONTROL_ERROR}),
    "longer than it said": ([opening(TEN, end=False), data(0, 1, bytes(11))], RESET),
    "shorter than it said": ([opening(TEN, end=False), data(0, 1, bytes(5)), data(1, 1, bytes(4))], RESET),
    "another request shorter than it said": ([opening(OTHER_TEN, end=False), data(1, 1, bytes(4))], RESET),
    "pseudo-headers in trailers": ([BEGUN, opening([METHOD])], RESET),
    "pseudo-headers in trailers of another request": ([opening(GET, end=False), opening([METHOD])], RESET),
    "second HEADERS": ([BEGUN, opening([], end=False)], WRONG),
    "table of the wrong size": ([headers(END, 1, b"\x3f\xe2\x1f" + encode(CALL))], {0: ErrorCode.COMPRESSION_ERROR}),
    "table that changes late": ([headers(END, 1, encode(CALL) + b"\x20")], {0: ErrorCode.COMPRESSION_ERROR}),
    "entry that does not exist": ([headers(END, 1, b"\xff\x00")], {0: ErrorCode.COMPRESSION_ERROR}),
    "exactly as long as it said": ([opening(TEN, end=False), data(1, 1, b"\0\0\0\0\5hello")], {}),
    "window updates after the end": ([opening(GET), window_update(1, 10), frames.rst_stream(1, ErrorCode.CANCEL)], {}),
    "PRIORITY at any time": ([frame(frames.PRIORITY, 0, 3, priority_of(1)), ENDED], {}),
}


@pytest.mark.parametrize("several", [False, True], ids=["a call at a time", "several"])
@pytest.mark.parametrize(("steps", "expected"), CASES.values(), ids=CASES)
def test_a_server_answers_as_the_standard_says(
    steps: list[bytes], expected: dict[int, ErrorCode], several: bool
) -> None:
    if several and ErrorCode.REFUSED_STREAM in expected.values():
        expected = {}
    assert errors(*steps, several=several) == expected


@pytest.mark.skipif(H2SPEC is None, reason="there is no h2spec on the PATH, and H2SPEC names none")
@pytest.mark.parametrize("several", [False, True], ids=["a call at a time", "several"])
def test_all_cases_of_h2spec_pass(several: bool) -> None:
    assert H2SPEC is not None
    with listening(several=several) as port:
        command = [H2SPEC, "--strict", "-h", "127.0.0.1", "-p", str(port), "-o", "10"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S * 4, check=False).stdout
    assert f"{H2SPEC_CASES} tests, {H2SPEC_CASES} passed, 0 skipped, 0 failed" in said, said[said.find("Failures") :]


@contextmanager
def listening(*, several: bool) -> Iterator[int]:
    """Serves any number of connections, each as an event loop does; yields the port."""
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with suppress(ConnectionError, TimeoutError), closing(serving(sock, several=several)) as server:
            server.blocking = False
            while True:
                run_turns(server)
                select.select([sock], [], [], TIMEOUT_S)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            if stopping.is_set():
                sock.close()
                return
            threads.append(threading.Thread(target=serve, args=(sock,)))
            threads[-1].start()

    stopping = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        port: int = listener.getsockname()[1]
        yield port
        stopping.set()
        socket.create_connection(("127.0.0.1", port)).close()
        acceptor.join()
    for thread in threads:
        thread.join()
