"""What an end sends: no more than its peer takes, nothing after the end, and what it earns the peer."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from tests.unit.wire.http2.peers import HELLO, carrier, pair

from bngrad_wire.http2 import ClientCall, ClientConnection, RpcError, ServerCall, ServerConnection, frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.header_block import encode

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("content-type", "application/grpc")]
RESPONSE = [(":status", "200"), ("content-type", "application/grpc")]
END = frames.END_HEADERS | frames.END_STREAM
OK = frames.frame(frames.HEADERS, END, 1, encode([*RESPONSE, ("grpc-status", "0")]))
RESET = frames.rst_stream(1, ErrorCode.CANCEL)
LARGE = 2**20
NARROW_WINDOWS = {
    "of the stream": (frames.DEFAULT_WINDOW, LARGE),
    "of the connection": (LARGE, 0),
    "of both": (frames.DEFAULT_WINDOW, 0),
}


def allowing(
    stream_nbytes: int = LARGE, more_nbytes: int = LARGE, max_frame_nbytes: int = frames.LARGEST_FRAME_SIZE
) -> bytes:
    """What a peer says first: the bytes it takes of a stream, of the connection beyond the default, and in a frame."""
    settings = {frames.INITIAL_WINDOW_SIZE: stream_nbytes, frames.MAX_FRAME_SIZE: max_frame_nbytes}
    return frames.settings(settings) + (frames.window_update(0, more_nbytes) if more_nbytes else b"")


@contextmanager
def client(said: bytes) -> Iterator[tuple[ClientCall, socket.socket]]:
    """A call, and its raw server, which has said something."""
    near, far = pair("unix")
    with far, closing(ClientConnection(near, "localhost")) as connection:
        far.sendall(said)
        connection.handle_available_frames()
        yield connection.call("/a/b"), far


@contextmanager
def server(said: bytes, flags: int = END) -> Iterator[tuple[ServerCall, socket.socket]]:
    """A call without messages as its server has it, and its raw client; flags are those of its headers."""
    near, far = pair("unix")
    with near, closing(ServerConnection(far)) as connection:
        near.sendall(HELLO + said + frames.frame(frames.HEADERS, flags, 1, encode(REQUEST)))
        call = connection.accept()
        assert call is not None
        yield call, near


def received(sock: socket.socket) -> list[tuple[int, int, bytes]]:
    """Kind, flags and content of the frames that have arrived for a stream, after a preface."""
    data = sock.recv(2**22).removeprefix(frames.PREFACE)
    found, position = [], 0
    while position < len(data):
        length, kind, flags, stream_id = frames.parse_header(data, position)
        start, position = position + frames.HEADER_NBYTES, position + frames.HEADER_NBYTES + length
        if stream_id:
            found.append((kind, flags, data[start:position]))
    return found


def kinds(sock: socket.socket) -> list[int]:
    """The kinds of these frames."""
    return [kind for kind, _, _ in received(sock)]


@pytest.mark.parametrize("windows", NARROW_WINDOWS.values(), ids=NARROW_WINDOWS)
@pytest.mark.parametrize("excess", [0, 1])
def test_messages_are_sent_at_once_if_their_peers_windows_have_room(windows: tuple[int, int], excess: int) -> None:
    sizes = [100, frames.DEFAULT_WINDOW - 100 - 2 * 5 + excess]
    with client(allowing(*windows)) as (call, _):
        assert call.has_window_for(sizes) == (not excess)
        assert call.send_all([[bytes(size)] for size in sizes]) == (not excess)
        assert call.send_room == (frames.DEFAULT_WINDOW if excess else 0)


def test_nothing_is_sent_after_the_last_message() -> None:
    with client(allowing()) as (call, far):
        assert call.send_all([[b"first"], [b"last"]])
        assert received(far)[1:] == [(frames.DATA, frames.END_STREAM, b"\0\0\0\0\5first\0\0\0\0\4last")]
        for send in (lambda: call.send_all([[b"more"]]), lambda: call.send_message(b"more")):
            with pytest.raises(RuntimeError, match="the sending side of this call has ended"):
                send()
        call.half_close()
        call.cancel()
        assert kinds(far) == [frames.RST_STREAM]


@pytest.mark.parametrize(("said", "is_failure"), [(RESET, True), (OK, False)], ids=["reset", "ended"])
def test_no_messages_are_sent_to_a_peer_that_has_ended_the_call(said: bytes, is_failure: bool) -> None:
    with client(allowing()) as (call, far):
        call.send_message(b"first")
        far.sendall(said)
        assert call.cancelled() == is_failure
        received(far)
        if is_failure:
            with pytest.raises(RpcError):
                call.send_all([[b"more"]])
        else:
            assert call.send_all([[b"more"]])
            assert call.receive_message() is None
            assert kinds(far) == [frames.RST_STREAM]


def test_a_stream_is_reset_if_its_server_ends_it_before_the_last_message_was_sent_whole() -> None:
    """Otherwise the server would wait for the rest."""
    with client(allowing(more_nbytes=0)) as (call, far):
        far.sendall(OK)
        call.send_message(bytes(frames.DEFAULT_WINDOW), end=True)
        assert call.receive_message() is None
        assert [(kind, flags) for kind, flags, _ in received(far)] == [
            (frames.HEADERS, frames.END_HEADERS),
            (frames.DATA, 0),
            (frames.RST_STREAM, 0),
        ]


SENDERS: dict[str, tuple[int, Callable[[ClientCall, bytes], object]]] = {
    "all messages in a frame": (frames.LARGEST_FRAME_SIZE, lambda call, message: call.send_all([[message]])),
    "a message in a frame": (frames.LARGEST_FRAME_SIZE, ClientCall.send_message),
    "a message in many frames": (frames.MIN_FRAME_SIZE, ClientCall.send_message),
}


@pytest.mark.parametrize(("max_frame_nbytes", "send"), SENDERS.values(), ids=SENDERS)
def test_messages_earn_the_frames_by_which_a_server_opens_its_windows(
    max_frame_nbytes: int, send: Callable[[ClientCall, bytes], object]
) -> None:
    nbytes = frames.MIN_FRAME_SIZE * 6
    with client(allowing(max_frame_nbytes=max_frame_nbytes)) as (call, _):
        connection = call._connection
        connection.frame_budget = 0
        send(call, bytes(nbytes))
        assert connection.frame_budget >= 2 * nbytes // frames.MIN_FRAME_SIZE


@pytest.mark.parametrize("nbytes", [10, frames.MIN_FRAME_SIZE * 6])
def test_a_response_earns_the_frames_by_which_a_client_opens_its_windows(nbytes: int) -> None:
    with server(allowing()) as (call, _):
        connection = carrier(call)
        connection.frame_budget = 0
        call.answer([bytes(nbytes)])
        assert connection.frame_budget >= 2 * -(-nbytes // frames.MIN_FRAME_SIZE)


@pytest.mark.parametrize("max_frame_nbytes", [frames.MIN_FRAME_SIZE, frames.LARGEST_FRAME_SIZE])
def test_the_trailers_of_a_response_are_sent_however_large_its_messages_are(max_frame_nbytes: int) -> None:
    trailers = encode([("x-load", "1")])
    with server(allowing(max_frame_nbytes=max_frame_nbytes)) as (call, near):
        call.answer([bytes(20_000)], trailers)
        *_, (kind, flags, content) = received(near)
        assert (kind, flags) == (frames.HEADERS, END)
        assert content.endswith(trailers)


def test_a_response_begins_once_also_if_a_message_was_sent_before() -> None:
    with server(allowing()) as (call, near):
        call.send_message(b"first")
        call.answer([b"second"])
        assert kinds(near) == [frames.HEADERS, frames.DATA, frames.DATA, frames.HEADERS]


def test_a_response_begins_with_the_table_size_that_its_client_has_set() -> None:
    """RFC 7541, section 4.2; the table has no entries anyway."""
    with server(allowing() + frames.settings({frames.HEADER_TABLE_SIZE: 0})) as (call, near):
        call.answer([b"message"])
        (_, _, block), *_ = received(near)
        assert block[0] == 0x20


@pytest.mark.parametrize(("flags", "more"), [(END, []), (frames.END_HEADERS, [frames.RST_STREAM])])
def test_what_a_client_has_not_sent_yet_of_an_answered_call_is_refused(flags: int, more: list[int]) -> None:
    with server(allowing(), flags) as (call, near):
        call.answer([b"message"])
        assert kinds(near) == [frames.HEADERS, frames.DATA, frames.HEADERS, *more]


@pytest.mark.parametrize("is_reset", [False, True], ids=["answered", "reset"])
def test_a_call_that_has_ended_is_not_answered(is_reset: bool) -> None:
    with server(allowing()) as (call, near):
        if is_reset:
            near.sendall(RESET)
            assert call.cancelled()
        else:
            call.answer([b"message"])
            received(near)
        with pytest.raises(RpcError):
            call.answer([b"message"])
        call.end()
        carrier(call).send_control(frames.goaway(0, ErrorCode.NO_ERROR))
        assert kinds(near) == []


def test_the_messages_of_a_call_whose_last_frame_has_not_arrived_are_not_known() -> None:
    with server(allowing(), frames.END_HEADERS) as (call, near):
        near.sendall(frames.frame(frames.DATA, frames.END_STREAM, 1, b"\0\0\0\0\5hello")[:-1])
        call._connection.handle_frame()
        assert call.received_messages() is None


def test_a_response_that_was_handled_before_is_not_waited_for() -> None:
    with client(allowing()) as (call, far):
        call.send_message(b"request", end=True)
        far.sendall(OK)
        assert not call.cancelled()
        assert call.take_messages() is None
        assert call.receive_message() is None
