"""Calls and responses that arrive whole are taken at once: with the outcome and at the price of frame by frame."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from io import RawIOBase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clock import Clock
from tests.unit.wire.http2.peers import HELLO, TIMEOUT_S, pair

from bngrad_wire.http2 import (
    ClientCall,
    ClientConnection,
    RpcError,
    ServerCall,
    ServerConnection,
    frames,
    header_block,
)
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.server import connection as server_module
from bngrad_wire.http2.sockets import receive_buffer

PATH = "/echo.Echo/echo"
CALL_BLOCK = header_block.encode(
    [
        (":method", "POST"), (":scheme", "http"), (":path", PATH), ("content-type", "application/grpc"),
        ("grpc-timeout", "60S"), ("x-request-id", "1"),
    ]
)  # fmt: skip
OPENING = header_block.encode([(":status", "200"), ("content-type", "application/grpc")])
OK = header_block.encode([("grpc-status", "0")])
BUDGET = 1000
CANCELLED_ID = 1
SETTINGS = frames.settings({})
WINDOW = frames.settings({frames.INITIAL_WINDOW_SIZE: 2**20})
LARGE_FRAMES = frames.settings({frames.INITIAL_WINDOW_SIZE: 2**20, frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME_SIZE})


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(data).to_bytes(4, "big") + data


def data(stream_id: int, content: bytes, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags, stream_id, content)


def call_of(stream_id: int, *contents: bytes, block: bytes = CALL_BLOCK) -> bytes:
    """The frames of a call: headers, and a DATA frame for each content."""
    sent = [frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, block)]
    sent += [data(stream_id, content) for content in contents[:-1]]
    return b"".join([*sent, data(stream_id, contents[-1], frames.END_STREAM)])


def response_of(stream_id: int, *contents: bytes, trailers: bytes = OK) -> bytes:
    sent = [frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, OPENING)]
    sent += [data(stream_id, content) for content in contents]
    flags = frames.END_HEADERS | frames.END_STREAM
    return b"".join([*sent, frames.frame(frames.HEADERS, flags, stream_id, trailers)])


@contextmanager
def server() -> Iterator[tuple[ServerConnection, socket.socket]]:
    """A server's end, and a raw client that has said hello."""
    near, far = pair("unix")
    with near, far:
        far.settimeout(TIMEOUT_S)
        connection = ServerConnection(near)
        connection.blocking = False
        with closing(connection):
            far.sendall(HELLO)
            assert connection.accept_nonblocking() is None
            yield connection, far


@contextmanager
def client() -> Iterator[tuple[ClientConnection, socket.socket]]:
    """A client's end, and a raw server."""
    near, far = pair("unix")
    with near, far:
        near.settimeout(TIMEOUT_S)
        with closing(ClientConnection(near, "localhost")) as connection:
            far.sendall(SETTINGS)
            yield connection, far


def accept(connection: ServerConnection, far: socket.socket, sent: bytes, *, at_once: bool) -> ServerCall:
    """Sends a call, at once or byte by byte, and returns it."""
    for part in [sent] if at_once else [sent[i : i + 1] for i in range(len(sent))]:
        far.sendall(part)
        call = connection.accept_nonblocking()
    assert call is not None
    return call


@pytest.mark.parametrize("contents", [[message(b"abc")], [message(b"ab"), message(b""), message(bytes(5000))]])
def test_a_call_is_the_same_however_it_arrives(contents: list[bytes]) -> None:
    seen, spent = [], []
    with server() as (connection, far):
        for number in range(4):
            connection.frame_budget = BUDGET
            call = accept(connection, far, call_of(2 * number + 1, *contents), at_once=number % 2 == 1)
            spent.append(BUDGET - connection.frame_budget)
            assert call.is_fully_received
            received = call.received_messages()
            if number < 2:
                call.answer([b"answer"])
            else:
                read = [call.read(nbytes) for nbytes in iter(call.receive_message, None)]
                assert read == [bytes(each) for each in received or ()]
                call.end()
            seen.append((call.path, call.timeout_s, dict(call.metadata), received))
            assert connection.stream is None
    assert seen == 4 * seen[:1]
    assert seen[0][:2] == (PATH, 60.0)
    assert spent == 4 * spent[:1]


def test_a_call_begins_as_its_own_headers_say_whatever_came_before() -> None:
    other = header_block.encode(
        [(":method", "POST"), (":scheme", "http"), (":path", "/other"), ("content-type", "application/grpc")]
    )
    with server() as (connection, far):
        for number, block in enumerate([CALL_BLOCK, CALL_BLOCK, other, other, CALL_BLOCK]):
            call = accept(connection, far, call_of(2 * number + 1, message(b"a"), block=block), at_once=True)
            is_other = block is other
            assert (call.path, call.timeout_s) == (("/other", None) if is_other else (PATH, 60.0))
            call.answer([])


def test_whole_calls_are_counted_among_the_frames_of_a_second() -> None:
    with server() as (connection, far):
        accept(connection, far, call_of(1, message(b"")), at_once=True).answer([])
        connection.frame_budget = 3
        for number in range(1, 40):
            call = accept(connection, far, call_of(2 * number + 1, b"", message(b"")), at_once=True)
            connection.stream = None  # it leads to nothing
            call.ended = True
            if connection.frame_budget <= 0:
                return
    raise AssertionError("the frames cost nothing")


def test_a_whole_call_that_its_client_resets_has_failed_and_the_next_one_is_taken() -> None:
    with server() as (connection, far):
        for number in (1, 5):
            call = accept(connection, far, call_of(number, message(b"abc")), at_once=True)
            far.sendall(frames.rst_stream(number, ErrorCode.CANCEL))
            assert call.cancelled()
            assert not call.receive_buffer
            call.end()
            after = accept(connection, far, call_of(number + 2, message(b"abc")), at_once=True)
            after.answer([])
        assert connection.is_before_call


LARGE = message(bytes(range(256)) * 800)
LARGE_CONTENTS = [LARGE[i : i + 16_000] for i in range(0, len(LARGE), 16_000)]


def trickle(connection: ServerConnection, far: socket.socket, sent: bytes) -> list[ServerCall | None]:
    """Sends a call in pieces, and returns what the connection had after each."""
    seen = []
    for i in range(0, len(sent), 10_000):
        far.sendall(sent[i : i + 10_000])
        seen.append(connection.accept_nonblocking())
    return seen


def finish(connection: ServerConnection, call: ServerCall | None) -> None:
    """Checks what a large call brought, and answers it."""
    assert call is not None
    connection.handle_buffered_frames()
    connection.blocking = True
    assert read_all(call) == [LARGE[5:]]
    call.end()
    connection.blocking = False


def begin_with_a_large_call(connection: ServerConnection, far: socket.socket) -> None:
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(far.sendall, call_of(1, *LARGE_CONTENTS))
        while (call := connection.accept_nonblocking()) is None:
            time.sleep(0.001)
        finish(connection, call)
        sending.result()


def test_the_rest_of_a_call_like_the_last_one_is_awaited_and_then_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has its own time for that."""
    clock = Clock()
    monkeypatch.setattr(server_module, "time", clock)
    with server() as (connection, far):
        begin_with_a_large_call(connection, far)
        for number in (3, 5):
            clock.now += server_module._REST_TIMEOUT_S
            *before, call = trickle(connection, far, call_of(number, *LARGE_CONTENTS))
            assert before == [None] * len(before)
            assert call is not None
            assert [bytes(each) for each in call.received_messages() or ()] == [LARGE[5:]]
            assert not connection.io.is_large  # another connection may have the buffer
            call.answer([])


def test_frames_that_come_with_the_beginning_of_a_call_do_not_keep_it_from_being_taken_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_REST_TIMEOUT_S", TIMEOUT_S)
    with server() as (connection, far):
        begin_with_a_large_call(connection, far)
        before = frames.frame(frames.PING, 0, 0, bytes(8)) + frames.window_update(0, 1000)
        sent = before + call_of(3, *LARGE_CONTENTS)
        far.sendall(sent[:70_000])
        window = connection.send_window
        assert connection.accept_nonblocking() is None
        assert connection.awaits_rest
        assert connection.send_window == window + 1000
        *_, call = trickle(connection, far, sent[70_000:])
        assert call is not None
        assert [bytes(each) for each in call.received_messages() or ()] == [LARGE[5:]]


@pytest.mark.parametrize("reason", ["late", "no buffer", "other frame", "too large"])
def test_a_call_whose_rest_cannot_be_awaited_is_received_frame_by_frame(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(server_module, "_REST_TIMEOUT_S", 0.0 if reason == "late" else TIMEOUT_S)
    spare: list[bytearray | None] = [] if reason == "no buffer" else [None]
    monkeypatch.setattr(receive_buffer, "_spare_buffers", spare)
    with server() as (connection, far):
        begin_with_a_large_call(connection, far)
        contents = LARGE_CONTENTS
        if reason == "too large":
            contents = [message(bytes(600_000))[i : i + 16_000] for i in range(0, 600_005, 16_000)]
        sent = call_of(3, *contents)
        if reason == "other frame":
            place = sent.index(data(3, LARGE_CONTENTS[1]))
            sent = sent[:place] + frames.frame(frames.PING, 0, 0, bytes(8)) + sent[place:]
        far.sendall(sent[:70_000])
        calls = [connection.accept_nonblocking() for _ in range(3)]
        assert (calls[-1] is None) == (reason == "too large")
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(far.sendall, sent[70_000:])
            while (call := connection.accept_nonblocking()) is None:
                time.sleep(0.001)
            connection.blocking = True
            assert read_all(call) == [b"".join(contents)[5:]]
            sending.result()
        call.end()
        assert not connection.awaits_rest
    assert spare == [] if reason == "no buffer" else len(spare) == 1  # it was given back


@pytest.mark.parametrize("contents", [[message(b"abc")], [message(b"ab"), message(bytes(5000)) + message(b"c")]])
def test_a_response_is_the_same_however_it_arrives(contents: list[bytes]) -> None:
    spent, seen = [], []
    with client() as (connection, far):
        for number in range(4):
            call = begin(connection)
            connection.frame_budget = BUDGET
            far.sendall(response_of(call.id, *contents))
            taken = call.take_messages() if number % 2 else None
            assert (taken is not None) == (number % 2 == 1)
            seen.append(read_all(call) if taken is None else [bytes(each) for each in taken])
            spent.append(BUDGET - connection.frame_budget)
            assert connection.is_idle
            assert connection._receive_window + connection._unacknowledged == frames.MAX_WINDOW  # it all comes back
    assert seen == 4 * seen[:1]
    assert b"".join(map(message, seen[0])) == b"".join(contents)
    assert spent[1:] == 3 * spent[1:2]


def learn_the_response(connection: ClientConnection, far: socket.socket) -> None:
    """Has the client see a response, since it takes those whole that are like one before."""
    call = begin(connection)
    far.sendall(response_of(call.id, message(b"first")))
    assert read_all(call) == [b"first"]


@pytest.mark.parametrize("size", [0, 10_000, 60_000, 100_000, 200_000])
def test_the_rest_of_a_response_is_awaited(size: int) -> None:
    contents = [message(b"header"), message(bytes(range(250)) * (size // 250))]
    with client() as (connection, far), ThreadPoolExecutor(1) as thread:
        learn_the_response(connection, far)
        for _ in range(3):
            call = begin(connection)
            sent = response_of(call.id, *contents)
            sending = thread.submit(trickle_to_client, far, sent)
            taken = call.take_messages(size)
            assert taken is not None
            assert [message(bytes(each)) for each in taken] == contents
            sending.result()
            assert connection.is_idle
            assert not connection.io.is_large  # another connection may have the buffer


def trickle_to_client(far: socket.socket, sent: bytes) -> None:
    for i in range(0, len(sent), 7_001):
        far.sendall(sent[i : i + 7_001])
        time.sleep(0.001)


@pytest.mark.parametrize("reason", ["no buffer", "too large", "unexpected"])
def test_a_response_that_no_buffer_takes_is_read_frame_by_frame(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    spare: list[bytearray | None] = [] if reason == "no buffer" else [None]
    monkeypatch.setattr(receive_buffer, "_spare_buffers", spare)
    size = 300_000 if reason == "too large" else 100_000
    with client() as (connection, far), ThreadPoolExecutor(1) as thread:
        learn_the_response(connection, far)
        for _ in range(2):
            call = begin(connection)
            sending = thread.submit(far.sendall, response_of(call.id, message(bytes(size))))
            assert call.take_messages(0 if reason == "unexpected" else size) is None
            assert read_all(call) == [bytes(size)]
            sending.result()
            assert connection.is_idle
    assert len(spare) == (reason != "no buffer")


def test_a_large_response_that_begins_like_another_is_not_awaited_for_longer_than_its_beginning() -> None:
    """Its timeout is set again once it has begun."""
    with client() as (connection, far):
        learn_the_response(connection, far)
        call = begin(connection)
        far.sendall(frames.frame(frames.HEADERS, frames.END_HEADERS, call.id, OPENING) + data(call.id, message(b"a")))
        assert call.take_messages(10_000_000) is None


def test_the_large_buffer_is_given_back_with_a_response_that_is_not_taken_whole() -> None:
    with client() as (connection, far), ThreadPoolExecutor(1) as thread:
        learn_the_response(connection, far)
        call = begin(connection)
        failed = header_block.encode([("grpc-status", "8")])
        sending = thread.submit(far.sendall, response_of(call.id, message(bytes(100_000)), trailers=failed))
        assert call.take_messages(100_000) is None
        assert connection.io.is_large
        with pytest.raises(RpcError):
            read_all(call)
        sending.result()
        assert not connection.io.is_large


@pytest.mark.parametrize("sizes", [[16_379], [16_380], [100, 100_000], [262_138], [262_139], [200_000, 200_000]])
def test_a_whole_response_has_one_data_frame_if_it_is_not_too_large(sizes: list[int]) -> None:
    messages = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    with server() as (connection, far), ThreadPoolExecutor(1) as thread:
        far.sendall(LARGE_FRAMES + frames.window_update(0, 2**20))
        call = accept(connection, far, call_of(1, message(b"a")), at_once=True)
        window = connection.send_window
        connection.blocking = True
        receiving = thread.submit(received_frames, far)
        call.answer(messages)
        kinds, content = receiving.result()
        total = sum(sizes) + 5 * len(sizes)
        expected_frames = 1 if total < 2**18 else len(sizes)
        assert kinds == [frames.HEADERS, *[frames.DATA] * expected_frames, frames.HEADERS]
        assert content == b"".join(map(message, messages))
        assert window - connection.send_window == total


def received_frames(far: socket.socket) -> tuple[list[int], bytes]:
    """Reads frames up to a stream's end; returns the kinds of those that belong to streams, and the content of DATA."""
    kinds, content = [], b""
    with far.makefile("rb", buffering=0) as file:
        flags = 0
        while not flags & frames.END_STREAM:
            length, kind, flags, stream_id = frames.parse_header(read_exactly(file, frames.HEADER_NBYTES), 0)
            payload = read_exactly(file, length)
            if not stream_id:
                flags = 0
                continue
            kinds.append(kind)
            content += payload if kind == frames.DATA else b""
    return kinds, content


def read_exactly(file: RawIOBase, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += file.read(nbytes - len(data)) or b""
    return data


@pytest.mark.parametrize("sizes", [[100, 100], [100, 16_374], [100, 16_375], [6, 120_000, 120_000], [6, 262_128]])
@pytest.mark.parametrize("takes_large_frames", [False, True])
def test_messages_and_their_end_are_sent_in_one_frame_that_the_peer_takes(
    sizes: list[int], takes_large_frames: bool
) -> None:
    messages = [[b"ab", bytes(size - 2)] for size in sizes]
    total = sum(sizes) + 5 * len(sizes)
    fits = total < 2**18 and (takes_large_frames or total <= frames.MIN_FRAME_SIZE)
    with client() as (connection, far), ThreadPoolExecutor(1) as thread:
        far.sendall((LARGE_FRAMES if takes_large_frames else WINDOW) + frames.window_update(0, 2**20))
        read_exactly(far.makefile("rb", buffering=0), len(frames.PREFACE))
        for _ in range(3):
            connection.handle_frame()
        call = connection.call(PATH)
        window = connection.send_window
        receiving = thread.submit(received_frames, far)
        assert call.send_all(messages) == fits
        if fits:
            assert window - connection.send_window == total
        else:
            for pieces in messages:
                call.send_message(*pieces, more=True)
            call.half_close()
        kinds, content = receiving.result()
        assert content == b"".join(message(b"".join(pieces)) for pieces in messages)
        if fits:
            assert kinds == [frames.HEADERS, frames.DATA]


PIECES = st.lists(
    st.one_of(
        st.sampled_from(["opening", "other opening", "trailers", "failed trailers", "reset", "ping", "end of data"]),
        st.lists(st.binary(max_size=300).map(message), max_size=3).map(b"".join),
        st.binary(max_size=20),
    ),
    max_size=6,
)


@given(between=PIECES, is_usual=st.booleans(), cut=st.integers(0, 40))
@settings(deadline=None)
def test_whatever_a_server_answers_the_outcome_is_that_of_frame_by_frame(
    between: list[str | bytes], is_usual: bool, cut: int
) -> None:
    """A response that its server's end cuts off may be lost as a whole, though its beginning said that it fails."""
    expected = outcome_of(between, is_usual, cut, nbytes=None)
    has_end = is_usual and not cut
    for nbytes in (0, 100_000):
        outcome = outcome_of(between, is_usual, cut, nbytes=nbytes)
        assert outcome == expected or (outcome == "lost" and not has_end)


def outcome_of(between: list[str | bytes], is_usual: bool, cut: int, *, nbytes: int | None) -> object:
    """Returns what a client gets of a response, for which it tries to take it whole unless the size is None."""
    with client() as (connection, far):
        learn_the_response(connection, far)
        call = begin(connection)
        pieces = ["opening", *between, "trailers"] if is_usual else between
        sent = b"".join(response_piece(piece, call.id) for piece in pieces)
        far.sendall(sent[: len(sent) - cut])
        far.close()
        try:
            taken = None if nbytes is None else call.take_messages(nbytes)
            return read_all(call) if taken is None else [bytes(each) for each in taken]
        except RpcError as error:
            return error.code
        except ConnectionError:
            return "lost"


def response_piece(piece: str | bytes, stream_id: int) -> bytes:
    if isinstance(piece, bytes):
        return data(stream_id, piece)
    other = header_block.encode([(":status", "200"), ("content-type", "application/grpc"), ("a", "b")])
    failed = header_block.encode([("grpc-status", "8")])
    end = frames.END_HEADERS | frames.END_STREAM
    return {
        "opening": frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, OPENING),
        "other opening": frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, other),
        "trailers": frames.frame(frames.HEADERS, end, stream_id, OK),
        "failed trailers": frames.frame(frames.HEADERS, end, stream_id, failed),
        "reset": frames.rst_stream(stream_id, ErrorCode.CANCEL),
        "ping": frames.frame(frames.PING, 0, 0, bytes(8)),
        "end of data": data(stream_id, b"", frames.END_STREAM),
    }[piece]


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        (
            lambda stream_id: response_of(
                stream_id, message(b"a"), trailers=header_block.encode([("grpc-status", "8")])
            ),
            8,
        ),
        (lambda stream_id: response_of(stream_id, message(b"a", flag=1)), 12),
        (lambda stream_id: response_of(stream_id, message(b"abc")[:-1]), 13),
        (lambda stream_id: response_of(stream_id, *[message(b"a")] * 9), 0),
        (lambda stream_id: SETTINGS + response_of(stream_id, message(b"a")), 0),
        (lambda stream_id: amid_response(stream_id, frames.frame(frames.PING, 0, 0, message(b"abc"))), 0),
        (
            lambda stream_id: response_of(stream_id, message(b"a")).replace(
                data(stream_id, message(b"a")), data(stream_id, message(b"a"), frames.END_STREAM)
            ),
            13,
        ),
        (lambda stream_id: amid_response(stream_id, data(CANCELLED_ID, message(b"b"))), 0),
    ],
    ids=[
        "status",
        "compressed",
        "cut off",
        "many frames",
        "another frame first",
        "another frame amid",
        "no trailers",
        "data of a call before",
    ],
)
def test_any_other_response_is_read_frame_by_frame(response: object, outcome: int) -> None:
    assert callable(response)
    with client() as (connection, far):
        cancelled = begin(connection)
        cancelled.cancel()
        assert cancelled.id == CANCELLED_ID
        learn_the_response(connection, far)
        call = begin(connection)
        far.sendall(response(call.id))
        assert call.take_messages() is None
        if outcome:
            with pytest.raises(RpcError) as raised:
                read_all(call)
            assert raised.value.code == outcome
        else:
            assert set(read_all(call)) == {b"a"}


def amid_response(stream_id: int, sent: bytes) -> bytes:
    """A response with another frame before the frame of its message."""
    response, content = response_of(stream_id, message(b"a")), data(stream_id, message(b"a"))
    return response.replace(content, sent + content)


def begin(connection: ClientConnection) -> ClientCall:
    call = connection.call(PATH, timeout_s=60)
    call.send_message(b"request", end=True)
    return call


def read_all(call: ClientCall | ServerCall) -> list[bytes]:
    return [call.read(nbytes) for nbytes in iter(call.receive_message, None)]
