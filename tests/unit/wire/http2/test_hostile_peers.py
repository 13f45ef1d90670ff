"""Peers that break the protocol, stop at any byte, or send random bytes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.wire.http2.peers import HELLO, TIMEOUT_S, answered, called, heard, pair, serve, unary

from bngrad_wire import http2
from bngrad_wire.http2 import (
    ClientConnection,
    PeerGoneError,
    ProtocolError,
    RpcError,
    ServerConnection,
    connection_state,
    frames,
    sending,
)
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.frames import frame, window_update
from bngrad_wire.http2.header_block import encode

headers, continuation = partial(frame, frames.HEADERS), partial(frame, frames.CONTINUATION)
REQUEST = encode([(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("content-type", "application/grpc")])
CALL = headers(frames.END_HEADERS, 1, REQUEST)
MESSAGE = frame(frames.DATA, frames.END_STREAM, 1, b"\0\0\0\0\5hello")
SETTINGS = frames.settings({})
RESPONSE = encode([(":status", "200"), ("content-type", "application/grpc")])
OK = encode([("grpc-status", "0")])
END = frames.END_HEADERS | frames.END_STREAM


def huge(kind: int, stream_id: int) -> bytes:
    return frame(kind, 0, stream_id, bytes(2**16))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"GET / HTTP/1.1\r\n", "does not begin with the preface of HTTP/2", id="HTTP/1"),
        pytest.param(b"\x16\x03\x01", "does not begin with the preface of HTTP/2", id="TLS"),
        pytest.param(frames.PREFACE + CALL, "the first frame is of type 1, not SETTINGS", id="no SETTINGS"),
        pytest.param(HELLO + huge(frames.PING, 0), "a frame of type 6 has 65536 bytes", id="huge PING"),
        pytest.param(HELLO + huge(frames.HEADERS, 1), "a frame of type 1 has 65536 bytes", id="huge HEADERS"),
        pytest.param(HELLO + frame(frames.PING, 0, 0, b"1"), "type 6 has 1 bytes, not 8", id="short PING"),
        pytest.param(HELLO + frame(frames.SETTINGS, 0, 0, b"1"), "SETTINGS of 1 bytes", id="short SETTINGS"),
        pytest.param(HELLO + frame(frames.SETTINGS, 1, 0, bytes(6)), "acknowledgement of SETTINGS", id="long ACK"),
        pytest.param(HELLO + frame(frames.SETTINGS, 0, 1, b""), "type 4 came on stream 1", id="SETTINGS on a stream"),
        pytest.param(HELLO + frames.settings({4: 2**31}), "INITIAL_WINDOW_SIZE is", id="window setting"),
        pytest.param(HELLO + frames.settings({5: 100}), "MAX_FRAME_SIZE is 100", id="frame setting"),
        pytest.param(HELLO + frames.settings({2: 2}), "ENABLE_PUSH is 2", id="push setting"),
        pytest.param(HELLO + frame(frames.GOAWAY, 0, 0, b"1"), "GOAWAY of 1 bytes", id="short GOAWAY"),
        pytest.param(HELLO + frame(frames.DATA, 0, 0, b"1"), "DATA on stream 0", id="DATA on the connection"),
        pytest.param(HELLO + frame(frames.DATA, 0, 5, b"1"), "stream 5, which was never opened", id="idle DATA"),
        pytest.param(HELLO + frame(frames.RST_STREAM, 0, 5, bytes(4)), "RST_STREAM on stream 5", id="idle RST_STREAM"),
        pytest.param(HELLO + frame(frames.RST_STREAM, 0, 0, bytes(4)), "type 3 came on stream 0", id="RST_STREAM on 0"),
        pytest.param(HELLO + headers(END, 2, REQUEST), "HEADERS on stream 2", id="even stream"),
        pytest.param(HELLO + headers(END, 0, REQUEST), "HEADERS on stream 0", id="stream zero"),
        pytest.param(HELLO + frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), "type 5 came where none may", id="push"),
        pytest.param(HELLO + continuation(4, 1, b""), "type 9 came where none may", id="CONTINUATION"),
        pytest.param(HELLO + headers(0, 1, REQUEST) + MESSAGE, "inside a header block", id="interrupted"),
        pytest.param(HELLO + headers(END | 8, 1, b"\xff"), "padding is longer", id="HEADERS padding"),
        pytest.param(HELLO + headers(END, 1, b"\xff\xff\xff"), "cannot be decoded", id="HPACK garbage"),
        pytest.param(HELLO + headers(END, 1, b"\xbe"), "cannot be decoded", id="HPACK index"),
        pytest.param(HELLO + headers(END, 1, encode([("a", "b" * 17000)])), "the limit is 16384", id="long HEADERS"),
        pytest.param(
            HELLO + headers(0, 1, b"") + continuation(0, 1, bytes(16000)) * 5,
            "a header block has more than 65536 bytes",
            id="CONTINUATION flood",
        ),
        pytest.param(
            HELLO + headers(0, 1, b"") + continuation(0, 1, b"") * 5000,
            "or 32 CONTINUATION frames",
            id="empty CONTINUATION flood",
        ),
        pytest.param(HELLO + window_update(0, 0), "WINDOW_UPDATE by 0", id="no increment"),
        pytest.param(HELLO + window_update(0, 2**31 - 1), "connection's window too large", id="connection overflow"),
        pytest.param(
            HELLO + CALL + window_update(1, 2**31 - 1 - 65535) + frames.settings({4: 65536}),
            "SETTINGS makes a stream's window too large",
            id="SETTINGS overflow",
        ),
        pytest.param(HELLO + CALL + frame(frames.DATA, 8, 1, b"\x05abc"), "padding is longer", id="DATA padding"),
        pytest.param(HELLO + CALL + frame(frames.DATA, 8, 1, b""), "padding is longer", id="no padding length"),
        pytest.param(HELLO + CALL + headers(4, 1, OK), "a second header block", id="second HEADERS"),
    ],
)
def test_the_server_says_what_a_client_did_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        answered(data)


def test_a_refused_client_is_told_why_with_goaway() -> None:
    near, far = pair("unix")
    with near:
        near.sendall(HELLO + window_update(0, 0))
        with pytest.raises(ProtocolError):
            serve(far)
        answer = near.recv(1000)
    assert answer.endswith(b"WINDOW_UPDATE by 0 on stream 0")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3, "the first frame is of type", id="HTTP/1"),
        pytest.param(SETTINGS + headers(4, 3, RESPONSE), "the server opened stream 3", id="wrong stream"),
        pytest.param(SETTINGS + headers(4, 2, RESPONSE), "stream 2, which was never", id="pushed stream"),
        pytest.param(SETTINGS + frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), "came where none may", id="push"),
        pytest.param(SETTINGS + headers(4, 1, RESPONSE) * 2, "trailers of stream 1 do not end", id="no end"),
    ],
)
def test_the_client_says_what_a_server_did_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        called(data)


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (headers(END, 1, encode([(":status", "404")])), 12, "HTTP status 404"),
        (headers(4, 1, encode([(":status", "503")])), 14, "HTTP status 503"),
        (headers(END, 1, RESPONSE), 2, "without grpc-status"),
        (headers(END, 1, encode([(":status", "200"), ("grpc-status", "x")])), 2, "status 2"),
        (headers(4, 1, RESPONSE) + frame(frames.DATA, 1, 1, b""), 13, "without a status"),
        (headers(4, 1, RESPONSE) + frame(frames.DATA, 0, 1, b"\1\0\0\0\0"), 12, "compressed"),
        (frames.rst_stream(1, ErrorCode.REFUSED_STREAM), 14, "REFUSED_STREAM"),
        (frames.rst_stream(1, ErrorCode.INTERNAL_ERROR), 14, "INTERNAL_ERROR"),
        (frames.rst_stream(1, ErrorCode.ENHANCE_YOUR_CALM), 8, "ENHANCE_YOUR_CALM"),
        (frames.rst_stream(1, ErrorCode.NO_ERROR), 13, "NO_ERROR"),
        (frame(frames.RST_STREAM, 0, 1, b"\0\0\1\0"), 13, "error 256"),
    ],
)
def test_a_response_that_is_not_grpc_or_is_reset_maps_to_a_status(data: bytes, code: int, message: str) -> None:
    with pytest.raises(RpcError, match=message) as error:
        called(SETTINGS + data)
    assert error.value.code == code


def test_a_goaway_below_the_call_says_the_peer_has_gone_and_why() -> None:
    with pytest.raises(PeerGoneError, match="GOAWAY, ENHANCE_YOUR_CALM too many pings"):
        called(SETTINGS + frames.goaway(0, ErrorCode.ENHANCE_YOUR_CALM, "too many pings"))


@pytest.mark.parametrize(
    ("method", "content_type"),
    [
        ("GET", ""),
        ("POST", "application/json"),
        ("POST", "application/grpc-web"),
        ("POST", "application/grpc-web+proto"),
    ],
)
def test_a_request_that_is_not_grpc_gets_an_http_status(method: str, content_type: str) -> None:
    request = encode([(":method", method), (":scheme", "http"), (":path", "/"), ("content-type", content_type)])
    answer = answered(HELLO + headers(END, 1, request))
    assert encode([(":status", "415")]) in answer


@pytest.mark.parametrize("suffix", ["", "+proto", ";charset=utf-8"])
def test_a_content_type_of_grpc_may_name_more(suffix: str) -> None:
    request = [(":method", "POST"), (":scheme", "http"), (":path", "/"), ("content-type", f"application/grpc{suffix}")]
    assert b"hello" in answered(HELLO + headers(frames.END_HEADERS, 1, encode(request)) + MESSAGE)


def test_a_client_that_compresses_is_told_that_the_server_does_not() -> None:
    answer = answered(HELLO + CALL + frame(frames.DATA, 1, 1, b"\1\0\0\0\5hello"))
    assert encode([("grpc-accept-encoding", "identity"), ("grpc-status", "12")]) in answer


def test_a_long_request_that_is_not_grpc_keeps_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_state, "WINDOW_UPDATE_NBYTES", 5000)
    upload = headers(frames.END_HEADERS, 1, encode([(":method", "PUT"), (":scheme", "http"), (":path", "/")]))
    upload += frame(frames.DATA, 0, 1, bytes(5000))
    assert heard((HELLO + upload, window_update(1, 5000)), (frame(frames.DATA, 1, 1, b""), b"This port serves gRPC"))


def test_a_head_request_gets_headers_alone() -> None:
    request = encode([(":method", "HEAD"), (":scheme", "http"), (":path", "/")])
    refused = encode([(":status", "415"), ("content-type", "text/plain")])
    for sent in headers(END, 1, request), headers(frames.END_HEADERS, 1, request) + MESSAGE:
        answer = answered(HELLO + sent + AGAIN)
        assert answer.count(headers(END, 1, refused)) == 1
        assert b"This port serves gRPC" not in answer
        assert b"again" in answer


def test_a_malformed_deadline_ends_the_call_as_internal() -> None:
    answer = answered(HELLO + headers(END, 1, REQUEST + encode([("grpc-timeout", "1x")])))
    assert encode([("grpc-status", "13")]) in answer
    answer = answered(HELLO + headers(END, 1, REQUEST + encode([("grpc-timeout", "1x" * 4000)])))
    assert encode([("grpc-status", "13")]) in answer
    assert len(answer) < 1000


def test_a_call_beside_the_running_one_is_refused_and_the_running_one_goes_on() -> None:
    answer = answered(HELLO + CALL + headers(END, 3, REQUEST) + MESSAGE)
    assert frames.rst_stream(3, ErrorCode.REFUSED_STREAM) in answer
    assert b"hello" in answer


def test_a_client_that_keeps_sending_and_opens_no_window_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_BUFFERED_NBYTES", 50_000)
    message = frame(frames.DATA, 0, 1, b"\0\0\0\x27\x10" + bytes(10_000))
    next_call = headers(frames.END_HEADERS, 3, REQUEST) + frame(frames.DATA, 1, 3, b"\0\0\0\0\4next")
    answer = answered(HELLO + frames.settings({4: 100}) + CALL + message * 8 + next_call)
    assert frames.rst_stream(1, ErrorCode.ENHANCE_YOUR_CALM) in answer
    assert b"next" in answer


AGAIN = headers(frames.END_HEADERS, 3, REQUEST) + frame(frames.DATA, 1, 3, b"\0\0\0\0\5again")


def test_frames_of_calls_that_the_server_ended_change_nothing() -> None:
    compressed = frame(frames.DATA, 0, 1, b"\1\0\0\0\0")
    late = frame(frames.DATA, 0, 1, b"late") + window_update(1, 100) + headers(END, 1, encode([("x", "y")]))
    assert b"again" in heard((HELLO + CALL + compressed, encode([("grpc-status", "12")])), (late + AGAIN, b"again"))


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(frame(frames.DATA, 1, 1, b"\0\0\0\0\5he"), id="truncated"),
        pytest.param(frame(frames.DATA, 1, 1, b"\0\0\0"), id="truncated prefix"),
        pytest.param(frame(frames.DATA, 1, 1, b"\7\0\0\0\0"), id="flag"),
    ],
)
def test_a_message_that_is_no_message_fails_its_call_alone(message: bytes) -> None:
    answer = heard((HELLO + CALL + message + AGAIN, b"again"))
    assert encode([("grpc-status", "13")]) in answer


def fragments(block: bytes, stream_id: int = 1) -> bytes:
    return b"".join(frames.header_block(stream_id, block, frames.END_STREAM))


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(REQUEST + encode([("x", "y" * 60_000)]), id="60 KB in one header"),
        pytest.param(REQUEST + encode([(f"x-{number}", "y" * 500) for number in range(100)]), id="100 headers"),
        pytest.param(b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 10_000, id="HPACK bomb"),
        pytest.param(b"\x82" * 60_000, id="many of one byte"),
    ],
)
def test_too_much_metadata_fails_its_call_alone(block: bytes) -> None:
    """What comes after the limit still changes the table by which later blocks are read."""
    answer = answered(
        HELLO + fragments(block + b"\x40\x01k\x01v") + headers(frames.END_HEADERS, 3, REQUEST + b"\xbe") + AGAIN[-19:]
    )
    assert encode([("grpc-status", "8")]) in answer
    assert b"again" in answer


FLOODS = {
    "PING": frame(frames.PING, 1, 0, bytes(8)),
    "SETTINGS": frame(frames.SETTINGS, frames.ACK, 0, b""),
    "PRIORITY": frame(frames.PRIORITY, 0, 1, bytes(5)),
    "unknown": frame(99, 0, 0, b""),
    "empty DATA": frame(frames.DATA, 0, 1, b""),
    "DATA of a byte": frame(frames.DATA, 0, 1, b"x"),
    "padding": frame(frames.DATA, frames.PADDED, 1, b"\x05xxxxx"),
    "WINDOW_UPDATE": window_update(0, 1),
    "WINDOW_UPDATE of the call": window_update(1, 1),
    "RST_STREAM": frames.rst_stream(1, ErrorCode.CANCEL),
}
STATES = {
    "a running call": CALL,
    "a refused call": headers(frames.END_HEADERS, 1, encode([("a", "b")])),
    "a call that was ended": CALL + frame(frames.DATA, 0, 1, b"\1\0\0\0\0"),
}


def test_a_peer_that_is_not_trusted_may_send_fewer_frames() -> None:
    near, far = pair("unix")
    with near, closing(ServerConnection(far)) as connection:
        connection.distrust()
        near.sendall(HELLO + window_update(0, 1) * 150)
        with pytest.raises(ProtocolError, match="more than 100 frames within a second"):
            connection.accept()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("flood", FLOODS)
def test_every_frame_counts(state: str, flood: str) -> None:
    with pytest.raises(ProtocolError, match="more than 2000 frames within a second"):
        answered(HELLO + STATES[state] + FLOODS[flood] * 10_000)


LONG_SETTINGS = frame(frames.SETTINGS, 0, 0, frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, 65_535) * 2730)
LONG_BLOCK = REQUEST + encode([("x-long", "x" * 8000)])


@pytest.mark.parametrize(
    "flood",
    [lambda number: LONG_SETTINGS, lambda number: headers(END, 3 + 2 * number, LONG_BLOCK)],
    ids=["settings", "header blocks"],
)
def test_long_frames_cost_by_their_length(flood: Callable[[int], bytes]) -> None:
    near, far = pair("unix")
    with near, closing(ServerConnection(far)) as connection:
        near.sendall(HELLO + CALL)
        assert connection.accept() is not None
        near.recv(1000)

        def send(count: int) -> None:
            for number in range(count):
                near.sendall(flood(number))
                connection.handle_frame()
                near.recv(1000)

        with pytest.raises(ProtocolError, match="more than 2000 frames within a second"):
            send(100)


def test_the_window_is_whole_again_after_a_call_that_was_reset_with_unread_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_state, "WINDOW_UPDATE_NBYTES", 5000)
    near, far = pair("unix")
    with near, closing(ServerConnection(far)) as connection:
        near.sendall(HELLO + CALL + frame(frames.DATA, 0, 1, bytes(5000)))
        call = connection.accept()
        assert call is not None
        while len(call.receive_buffer) < 5000:
            assert not call.cancelled()
        near.recv(1000)
        near.sendall(frames.rst_stream(1, ErrorCode.CANCEL))
        while not call.cancelled():
            pass
        near.sendall(frames.frame(frames.PING, 0, 0, bytes(8)))
        connection.handle_frame()  # so that there is an answer
        assert window_update(0, 5000) in near.recv(1000)


def overflow(number: int) -> bytes:
    """Makes the server itself reset a call."""
    return window_update(number, 2**31 - 1)


@pytest.mark.parametrize("reset", [lambda number: frames.rst_stream(number, ErrorCode.CANCEL), overflow])
def test_calls_that_are_reset_cost_as_much_whichever_end_the_client_has_reset_them(
    reset: Callable[[int], bytes],
) -> None:
    calls = [headers(frames.END_HEADERS, number, REQUEST) + reset(number) for number in range(1, 2001, 2)]
    with pytest.raises(ProtocolError, match="more than 2000 frames within a second"):
        answered(HELLO + b"".join(calls))


def test_what_moves_calls_forward_earns_frames() -> None:
    """A thousand calls of small messages, and one of ten megabytes with a window update for each of its frames."""
    calls = b"".join(
        headers(frames.END_HEADERS, number, REQUEST) + frame(frames.DATA, 1, number, b"\0\0\0\0\5hello")
        for number in range(1, 4001, 2)
    )
    nbytes = 10 * 2**20
    updates = (window_update(0, 1) + window_update(4001, 1)) * 3
    large = headers(frames.END_HEADERS, 4001, REQUEST) + frame(frames.DATA, 0, 4001, b"\0" + nbytes.to_bytes(4, "big"))
    large += (frame(frames.DATA, 0, 4001, bytes(10_240)) + updates) * 1024 + frame(frames.DATA, 1, 4001, b"")
    hello = HELLO + window_update(0, 2**30) + frames.settings({4: 2**30})
    answer = heard((hello + calls + large, headers(END, 4001, OK)))
    assert answer.count(OK) == 2001


def recorded() -> tuple[bytes, bytes]:
    """Returns what the two ends send during two calls, of which the first is cancelled."""
    near, far = pair("unix")
    with far, closing(ClientConnection(near, "localhost")) as connection:
        first = connection.call("/a/b", timeout_s=1, metadata=[("x", "y")])
        first.send_message(b"never mind")
        first.cancel()
        second = connection.call("/a/fail")
        second.send_message(b"hello", more=True)
        second.send_message(b"world" * 10, end=True)
        spoken = far.recv(100_000)
    return spoken, answered(HELLO + CALL + MESSAGE)


FROM_CLIENT, FROM_SERVER = recorded()


def outcome(run: Callable[[bytes], object], data: bytes) -> type[Exception] | None:
    try:
        run(data)
    except (ProtocolError, PeerGoneError, RpcError) as error:
        return next(kind for kind in (ProtocolError, PeerGoneError, RpcError) if isinstance(error, kind))
    return None


def test_a_client_that_stops_at_any_byte_never_hangs_the_server() -> None:
    outcomes = [outcome(answered, FROM_CLIENT[:end]) for end in range(len(FROM_CLIENT) + 1)]
    assert outcomes[0] is outcomes[-1] is None
    assert all(found is None or issubclass(found, PeerGoneError) for found in outcomes)
    assert sum(found is None for found in outcomes) < 10


def test_a_server_that_stops_at_any_byte_never_hangs_the_client() -> None:
    assert called(FROM_SERVER) == b"hello"
    for end in range(FROM_SERVER.index(OK) + len(OK)):
        found = outcome(called, FROM_SERVER[:end])
        assert found is not None
        assert issubclass(found, PeerGoneError)


EXPECTED = {None, ProtocolError, PeerGoneError}
FRAMES = st.builds(
    frame,
    st.integers(0, 10) | st.integers(0, 255),
    st.sampled_from([0, 1, 4, 5, 8, 0x2D]) | st.integers(0, 255),
    st.sampled_from([0, 1, 1, 1, 2, 3]) | st.integers(0, 2**31 - 1),
    st.binary(max_size=40) | st.sampled_from([REQUEST, RESPONSE, OK, b"\0\0\0\0\5hello", bytes(4), bytes(8)]),
)
BYTES = st.binary(max_size=200) | st.lists(FRAMES, max_size=10).map(b"".join)


@given(BYTES, st.booleans())
@settings(deadline=None, max_examples=400)
def test_any_bytes_of_a_client_end_the_connection_in_order_or_with_a_named_error(data: bytes, call: bool) -> None:
    assert outcome(answered, HELLO + (CALL if call else b"") + data) in EXPECTED


@given(BYTES, st.booleans())
@settings(deadline=None, max_examples=400)
def test_any_bytes_of_a_server_end_the_call_with_a_result_or_a_named_error(data: bytes, begun: bool) -> None:
    start = headers(frames.END_HEADERS, 1, RESPONSE) if begun else b""
    try:
        found = outcome(called, SETTINGS + start + data)
    except AssertionError:
        found = None  # The call was OK without one message.
    assert found in {*EXPECTED, RpcError}


@pytest.mark.slow
@given(st.integers(0, len(FROM_CLIENT) - 1), st.binary(min_size=1, max_size=4))
@settings(deadline=None, max_examples=300)
def test_a_damaged_stream_ends_in_order_or_with_a_named_error(start: int, damage: bytes) -> None:
    data = FROM_CLIENT[:start] + damage + FROM_CLIENT[start + len(damage) :]
    assert outcome(answered, data) in EXPECTED


def test_a_peer_that_says_nothing_runs_into_the_sockets_timeout() -> None:
    near, far = socket.socketpair()
    with far:
        near.settimeout(0.02)
        with closing(ClientConnection(near, "localhost")) as connection, pytest.raises(TimeoutError):
            unary(connection)


def received_by(data: bytes, turns: int) -> ServerConnection:
    """Returns a server's end that has had some turns since all of the data arrived."""
    near, far = pair("unix")
    http2.set_timeout(far, TIMEOUT_S)
    server = ServerConnection(far)
    server.blocking = False
    near.sendall(HELLO + data)
    near.close()
    for _ in range(turns):
        server.accept_nonblocking()
    return server


def test_a_turn_of_an_event_loop_handles_few_frames() -> None:
    """A receive buffer may hold 7000 frames."""
    with closing(received_by(frame(frames.PING, 0, 0, bytes(8)) * 100, turns=1)) as server:
        assert server.has_pending_input
        assert len(server.outbound) < 70
        server.accept_nonblocking()
        assert not server.has_pending_input
        assert not server.is_amid_frame
        assert len(server.outbound) == 101


@pytest.mark.parametrize(
    ("data", "is_amid"),
    [
        (b"", False),
        (CALL[:5], True),
        (CALL[:-1], True),
        (CALL[:9], True),
        (headers(0, 1, REQUEST), True),
        (headers(0, 1, REQUEST) + continuation(0, 1, b""), True),
        (frame(99, 0, 0, bytes(1000))[:-1], False),
        (huge(frames.HEADERS, 1)[:9], True),
    ],
)
def test_what_has_begun_is_known_and_never_waited_for(data: bytes, is_amid: bool) -> None:
    try:
        with closing(received_by(data, turns=1)) as server:
            assert not server.has_pending_input
            assert server.is_amid_frame == is_amid
            assert server.stream is None
    except ProtocolError:
        assert len(data) == 9


def test_a_header_block_may_come_in_pieces_while_nothing_waits() -> None:
    near, far = pair("unix")
    http2.set_timeout(far, TIMEOUT_S)
    with near, closing(ServerConnection(far)) as server:
        near.sendall(HELLO)
        flags = (0, 0, frames.END_HEADERS)
        pieces = [
            headers(0, 1, REQUEST[:10]),
            *(
                continuation(flag, 1, part)
                for flag, part in zip(flags, (REQUEST[10:11], b"", REQUEST[11:]), strict=True)
            ),
        ]
        for piece in pieces:
            assert server.accept_nonblocking() is None
            near.sendall(piece)
        call = server.accept_nonblocking()
        assert call is not None
        assert call.path == "/a/b"
        assert not server.is_amid_frame


def test_streams_that_were_refused_are_remembered_up_to_a_number() -> None:
    count = connection_state._MAX_CLOSED_EARLY + 1
    near, far = socket.socketpair()
    with near, far, closing(ServerConnection(near)) as connection:
        far.sendall(HELLO + CALL)
        for number in range(count):
            far.sendall(headers(frames.END_HEADERS, 3 + 2 * number, REQUEST))
            connection.accept_nonblocking()
        assert len(connection._closed_early) < count
