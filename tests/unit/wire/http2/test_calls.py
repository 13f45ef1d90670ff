"""Calls between the client and the server of this package."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
from tests.unit.wire.http2.peers import (
    SIZES,
    TIMEOUT_S,
    carrier,
    client,
    echo,
    in_thread,
    pair,
    serve,
    serve_until_gone,
    unary,
)

from bngrad_wire.http2 import ClientConnection, PeerGoneError, RpcError, ServerCall, ServerConnection, frames
from bngrad_wire.http2.frames import (
    ACK,
    INITIAL_WINDOW_SIZE,
    LARGEST_FRAME_SIZE,
    MIN_FRAME_SIZE,
    SETTINGS,
    frame,
    settings,
)


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


def test_frames_become_large_amid_the_first_large_message() -> None:
    with client() as connection:
        call = connection.call("/echo.Echo/echo")
        assert connection.max_frame_size == MIN_FRAME_SIZE
        call.send_message(bytes(64 * 2**20), end=True)
        assert connection.max_frame_size == LARGEST_FRAME_SIZE
        assert call.receive_message() == 64 * 2**20


@pytest.mark.parametrize(("nbytes", "frame_size"), [(2**16 - 1, MIN_FRAME_SIZE), (2**16, LARGEST_FRAME_SIZE)])
def test_a_client_of_large_messages_may_send_large_frames(nbytes: int, frame_size: int) -> None:
    with client() as connection:
        assert unary(connection, bytes(nbytes)) == bytes(nbytes)
        assert connection.max_frame_size == frame_size


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


@pytest.mark.parametrize(("count", "nbytes"), [(1, 2**26), (8, 2**23)])
def test_no_more_is_sent_of_a_call_that_its_server_has_refused(count: int, nbytes: int) -> None:
    received = []

    def answer(call: ServerCall) -> None:
        received.append(carrier(call).io.moved)
        if call.path.endswith("refused"):
            call.end(8, "full")
        else:
            echo(call)

    def send() -> None:
        for _ in range(count):
            call.send_message(message, more=True)
        call.half_close()

    message = bytes(nbytes)
    with client(answer=answer) as connection:
        assert unary(connection, message) == message  # frames may be large from now on
        call = connection.call("/echo.Echo/refused")
        with pytest.raises(RpcError, match="full"):
            send()
        assert unary(connection, b"next") == b"next"
    assert received[2] - received[1] < 2**25


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


def test_checking_for_cancellation_loses_no_received_data() -> None:
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


def test_a_ping_is_answered_where_a_waiting_call_is_checked_for_cancellation() -> None:
    """Or clients with a short keepalive would take the connection for dead."""
    acknowledged = threading.Event()

    def answer(call: ServerCall) -> None:
        while not acknowledged.is_set() and not call.cancelled():
            time.sleep(0.001)
        call.end()

    near, far = pair("unix")
    with in_thread(serve_until_gone, far, answer), closing(ClientConnection(near, "localhost")) as connection:
        call = connection.call("/a/b")
        call.send_message(b"", end=True)
        near.sendall(frames.frame(frames.PING, 0, 0, b"are you?"))
        received = b""
        while frames.frame(frames.PING, frames.ACK, 0, b"are you?") not in received:
            received += near.recv(1000)
        acknowledged.set()


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
        for act in (lambda: connection.send_control(PING), lambda: connection.call("/a/b")):
            with pytest.raises(PeerGoneError, match="sending timed out"):
                act()
            assert not connection.usable
        connection.close()


PING = b"\x00\x00\x08\x06\x00" + bytes(4 + 8)


@pytest.mark.parametrize("direction", ["it reads", "it sends"])
def test_a_peer_that_trickles_times_out_at_the_deadline(direction: str) -> None:
    near, far = pair("tcp")
    given_up = threading.Event()

    def dribble() -> None:
        for _ in range(1000):
            if given_up.wait(0.01):
                return
            if direction == "it reads":
                far.recv(2**18)
            else:
                far.send(PING)
        pytest.fail("the connection did not time out")

    near.settimeout(TIMEOUT_S)  # of each wait, so never reached
    connection = ClientConnection(near, "localhost")
    with far, in_thread(dribble):
        far.sendall(SERVER_HELLO)
        connection.io.deadline = time.monotonic() + 0.2
        call = connection.call("/a/b")
        act = partial(call.send_message, bytes(2**26)) if direction == "it reads" else call.receive_message
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


def test_an_answer_is_read_though_its_server_closed_before_the_client_acknowledged_settings() -> None:
    near, far = pair("unix")
    connection = ClientConnection(near, "localhost")
    asked = connection.call("/a/b")
    asked.send_message(b"hello", end=True)
    server = ServerConnection(far)
    call = server.accept()
    assert call is not None
    echo(call)
    server.close()
    assert asked.receive_message() == 5
    assert asked.receive_message() is None
    assert not connection.usable
    connection.close()


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


def test_a_connection_that_has_used_its_last_stream_number_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_STREAM_ID", 3)
    with client() as connection:
        unary(connection)
        assert connection.is_idle
        unary(connection)
        assert not connection.is_idle
        assert not connection.usable


def test_new_settings_are_acknowledged_after_what_was_sent_under_the_old_ones() -> None:
    """The acknowledgement says from where on they hold (RFC 9113, section 6.5.3)."""
    near, far = pair("unix")
    connection = ClientConnection(near, "localhost")
    asked = connection.call("/a/b")
    asked.send_message(b"please")
    with closing(ServerConnection(far)) as server, near:
        call = server.accept()
        assert call is not None
        assert call.receive_message() == 6
        near.recv(1000)
        call.send_message(b"hello", more=True)
        near.sendall(settings({INITIAL_WINDOW_SIZE: 0}))
        call.end()
        answer = near.recv(1000)
    assert answer.index(b"hello") < answer.index(frame(SETTINGS, ACK, 0, b""))


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


def test_a_call_and_a_connection_carry_more_than_a_window() -> None:
    message, buffer = bytes(2**26), memoryview(bytearray(2**26))

    def read(call: ServerCall) -> None:
        while (size := call.receive_message()) is not None:
            call.read_into(buffer[:size])
            call.send_message(b"read", more=True)
        call.end()

    with client(answer=read) as connection:
        call = connection.call("/echo.Echo/echo")
        for _ in range(frames.MAX_WINDOW // len(message) + 2):
            call.send_message(message)
            assert call.receive_message() == 4
        call.half_close()
        assert call.receive_message() is None
