"""Lanes of a connection, and what they have it send, with an event loop that runs in the test's thread."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.raw_http2 import data, headers, prefixed
from tests.unit.server.workers.additions import TIMEOUT_S, wait_until

from bngrad_wire.http2 import MultiplexedConnection, PeerGoneError, ProtocolError, ServerCall, Uploads, frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.sending import PREFIX
from bngrad_wire.http2.server.call import WHOLE_NBYTES
from bngrad_wire.http2.server.lane import Lane
from bngrad_wire.http2.server.outbound import KeptAnswers

LARGE = bytes(50_000)
"""A message that is sent from where it lies."""


class Loop:
    """Runs callbacks in the thread that made it, when that says so."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_current(self) -> bool:
        return threading.get_ident() == self._thread

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    @property
    def has_any(self) -> bool:
        return bool(self._callbacks)

    def run(self) -> None:
        while self._callbacks:
            self._callbacks.pop(0)()


class Pair:
    """A connection with one running call, and a client that sends bytes."""

    def __init__(self, opened: ExitStack, sent: bytes = b"") -> None:
        """The client has sent the beginning of the call."""
        near, far = socket.socketpair()
        for sock in (near, far):
            sock.settimeout(TIMEOUT_S)
        self.client = opened.enter_context(far)
        self.loop = Loop()
        self.answers = KeptAnswers(10_000)
        self.connection = MultiplexedConnection(near)
        opened.callback(self.connection.close)
        self.connection.blocking = False
        self.client.sendall(frames.PREFACE + frames.settings({}) + headers("/call", 1) + sent)
        assert self.connection.accept_nonblocking() is not None
        self.was_reading: list[bool] = []  # at each change
        self.lane = self.connection.multiplex(self.loop, 0.01, Uploads(100, 2**23), self.answers, self._note_change)
        self.lane.io.waits = round(TIMEOUT_S / 0.01)
        self.calls = opened.enter_context(ThreadPoolExecutor(2))
        opened.callback(self._end_calls)

    def _end_calls(self) -> None:
        """Ends what a test that failed has left to threads, which would wait for the event loop."""
        self.lane.lose("the test has ended")
        self.calls.shutdown(wait=False)
        while any(thread.is_alive() for thread in self.calls._threads):
            self.loop.run()
            time.sleep(0.001)

    def _note_change(self) -> None:
        self.was_reading.append(self.connection.is_reading)

    @property
    def call(self) -> ServerCall:
        assert isinstance(self.lane.stream, ServerCall)
        return self.lane.stream

    def read(self, *parts: bytes) -> tuple[list[tuple[Lane, ServerCall]], list[int], list[int]]:
        """What the connection finds in parts that the client sends."""
        self.client.sendall(b"".join(parts))
        return self.connection.read()

    def handle_events(self) -> None:
        """Reads what has arrived, and runs the event loop."""
        self.connection.read()
        self.loop.run()

    def send(self, message: bytes) -> Future[None]:
        """Has a thread, which the lane is lent to, send a message; returns once that waits for the event loop."""
        self.lane.is_lent = self.lane.blocking = True
        sent = self.calls.submit(self.call.send_message, message)
        wait_until(lambda: self.loop.has_any)
        return sent

    def finish(self, sent: Future[None]) -> BaseException | None:
        """Runs the event loop until a message was sent; returns why it was not."""

        def is_over() -> bool:
            self.loop.run()
            return sent.done()

        wait_until(is_over)
        return sent.exception()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as opened:
        yield Pair(opened)


def test_what_a_thread_sends_after_a_reset_is_dropped(pair: Pair) -> None:
    sent = pair.send(LARGE)
    assert pair.read(frames.rst_stream(1, ErrorCode.CANCEL))[1] == [1]
    pair.finish(sent)
    pair.connection.flush()
    assert not pair.connection.has_unsent
    assert pair.connection.send_window == frames.DEFAULT_WINDOW


def test_a_reset_ends_the_wait_for_a_window(pair: Pair) -> None:
    pair.lane._wait_s = 2 * TIMEOUT_S  # only a wake-up ends a wait
    pair.connection.send_window = 0
    sent = pair.send(LARGE)
    pair.loop.run()
    assert pair.connection.has_unsent
    assert not sent.done()
    pair.read(frames.rst_stream(1, ErrorCode.CANCEL))
    assert not pair.connection.has_unsent
    pair.finish(sent)


def test_a_lane_that_is_given_up_has_nothing_left_to_send(pair: Pair) -> None:
    pair.connection.send_window = 0
    sent = pair.send(LARGE)
    pair.loop.run()
    assert pair.connection.has_unsent
    pair.lane.lose("it is given up")
    wait_until(lambda: pair.loop.has_any)
    assert not sent.done()  # the connection may send from its memory still
    assert isinstance(pair.finish(sent), PeerGoneError)
    assert not pair.connection.has_unsent
    pair.connection.send_window = frames.DEFAULT_WINDOW
    assert pair.connection.send_room_of(1) == frames.DEFAULT_WINDOW


def test_nothing_follows_a_frame_that_could_not_be_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise MemoryError

    sent = pair.send(LARGE)
    with monkeypatch.context() as short_memory:
        short_memory.setattr(pair.connection.io, "send", fail)
        pair.loop.run()
    assert isinstance(pair.finish(sent), PeerGoneError)
    with pytest.raises(PeerGoneError):
        pair.connection.read()


def test_a_window_grows_only_once_some_of_a_large_message_is_read(pair: Pair) -> None:
    (relay,) = pair.connection._streams.values()
    pair.read(*(data(part, 1) for part in (prefixed(bytes(100_000))[:10_000], bytes(16_000), bytes(16_000))))
    assert pair.call.receive_message() == 100_000
    before = relay.receive_window
    pair.call.read(5_000)
    assert relay.receive_window == before
    pair.call.read(30_000)
    assert relay.receive_window > before + 2**20


def test_a_connection_is_read_again_once_a_call_that_has_arrived_is_read(pair: Pair) -> None:
    """Its answer may need windows that the client has opened meanwhile."""
    pair.lane.is_lent = True  # so it keeps what it is told
    nbytes = 81 * 2**14 - PREFIX.size  # the last frame is one too many
    message = prefixed(bytes(nbytes))
    for start in range(0, len(message), 2**14):
        assert pair.connection.is_reading
        pair.read(data(message[start : start + 2**14], 1, end=start + 2**14 == len(message)))
    assert not pair.connection.is_reading
    assert pair.call.receive_message() == nbytes
    pair.call.read(nbytes)
    assert pair.connection.is_reading
    assert pair.was_reading[-1:] == [True]


@settings(max_examples=30, deadline=None)
@given(
    reads=st.lists(st.sampled_from([1, 1000, 2**16 - 1, 2**16, 200_000, 2**20]), min_size=1, max_size=6),
    frame_sizes=st.lists(st.sampled_from([0, 5000, 2**14, 100_000]), min_size=1, max_size=6).filter(any),
    padding=st.sampled_from([None, 0, 1, 255]),
)
def test_a_thread_reads_what_the_client_sends(reads: list[int], frame_sizes: list[int], padding: int | None) -> None:
    """In the event loop's thread, or straight into the memory that it waits to have filled."""
    sizes = [*reads, *reads]
    message = random.Random(0).randbytes(sum(sizes))
    rest = b"".join(map(prefixed, (message, b"next")))
    with ExitStack() as opened:
        pair = Pair(opened)
        (relay,) = pair.connection._streams.values()
        window = relay.receive_window = WHOLE_NBYTES
        pair.lane.is_lent = pair.lane.blocking = True

        def receive() -> tuple[bytes, bytes]:
            assert pair.call.receive_message() == len(message)
            memory = memoryview(bytearray(len(message)))
            end = 0
            for size in sizes:
                end += size
                pair.call.read_into(memory[end - size : end])
            return bytes(memory), pair.call.read(pair.call.receive_message() or 0)

        def send() -> None:
            left, allowed = rest, window
            for nbytes in itertools.cycle(frame_sizes):
                if not left:
                    return
                part, left = left[:nbytes], left[nbytes:]
                length = len(part) + (0 if padding is None else 1 + padding)
                while allowed < length:
                    length_of_update, kind, _, stream_id = frames.parse_header(
                        pair.client.recv(9, socket.MSG_WAITALL), 0
                    )
                    payload = pair.client.recv(length_of_update, socket.MSG_WAITALL)
                    if (kind, stream_id) == (frames.WINDOW_UPDATE, 1):
                        allowed += int.from_bytes(payload, "big")
                allowed -= length
                if padding is None:
                    pair.client.sendall(data(part, 1))
                else:
                    header = frames.frame_header(length, frames.DATA, frames.PADDED, 1)
                    pair.client.sendall(b"".join([header, bytes([padding]), part, bytes(padding)]))

        received, sent = pair.calls.submit(receive), pair.calls.submit(send)

        def is_over() -> bool:
            pair.handle_events()
            return received.done() and sent.done()

        wait_until(is_over)
        sent.result()
        assert received.result() == (message, b"next")
        assert relay.receive_window >= window - relay.unacknowledged - pair.call.unacknowledged
        assert relay.unacknowledged + pair.call.unacknowledged < 2 * pair.lane.step_nbytes
        assert pair.lane.unread == 0


def receiving(pair: Pair, message: bytes) -> Future[bytes]:
    """Has a thread read a message, of which 50,000 bytes have come; returns once the loop is to fill the rest."""
    pair.lane.is_lent = pair.lane.blocking = True
    pair.lane._wait_s = 2 * TIMEOUT_S  # only a wake-up ends a wait
    pair.read(data(prefixed(message)[:50_000], 1))
    pair.connection.read()

    def receive() -> bytes:
        assert pair.call.receive_message() == len(message)
        memory = bytearray(len(message))
        pair.call.read_into(memoryview(memory))
        return bytes(memory)

    received = pair.calls.submit(receive)

    def is_waiting() -> bool:
        pair.loop.run()
        return pair.lane.target is not None

    wait_until(is_waiting)
    return received


def test_what_has_arrived_is_acknowledged_before_a_thread_waits_for_more(pair: Pair) -> None:
    received = receiving(pair, bytes(200_000))
    assert pair.lane.unread == 0
    pair.client.sendall(data(bytes(150_005), 1, end=True))

    def is_over() -> bool:
        pair.handle_events()
        return received.done()

    wait_until(is_over)
    received.result()


@pytest.mark.parametrize("frame_nbytes", [1000, 2**14, 30_000, 200_000])
def test_frames_fill_what_a_thread_waits_for_up_to_its_end(pair: Pair, frame_nbytes: int) -> None:
    message, following = random.Random(0).randbytes(200_000), bytes(range(100))
    rest = (prefixed(message) + prefixed(following))[50_000:]
    received = receiving(pair, message)
    sent = b"".join(data(rest[start : start + frame_nbytes], 1) for start in range(0, len(rest), frame_nbytes))
    connection = pair.connection
    window = connection._receive_window + connection._unacknowledged
    while sent:
        pair.client.sendall(sent[:50_000])
        sent = sent[50_000:]
        pair.handle_events()

    def is_over() -> bool:
        pair.handle_events()
        return received.done()

    wait_until(is_over)
    assert received.result() == message
    assert pair.call.receive_message() == len(following)
    assert pair.call.read(len(following)) == following
    assert pair.lane.unread == 0
    assert connection._receive_window + connection._unacknowledged == window


@pytest.mark.parametrize(("nbytes", "is_useful"), [(10_000, True), (1, False)])
def test_frames_are_useful_if_they_hold_much(pair: Pair, nbytes: int, *, is_useful: bool) -> None:
    pair.read(*[data(bytes(nbytes), 1)] * 4)
    assert pair.connection.was_useful is is_useful


def test_data_after_the_end_of_its_call_closes_the_connection(pair: Pair) -> None:
    pair.read(data(prefixed(bytes(10)), 1, end=True))
    with pytest.raises(ProtocolError, match="after its end"):
        pair.read(*[data(bytes(10), 1)] * 2)


def test_data_beyond_the_length_that_its_call_has_fails_that(pair: Pair) -> None:
    (relay,) = pair.connection._streams.values()
    relay.content_left = 25
    assert pair.read(*[data(bytes(10), 1)] * 3)[1] == [1]
    assert pair.call.failure is not None
    assert "content-length" in pair.call.failure.message


@pytest.mark.parametrize("budget", [0, 5, 30])
def test_frames_are_handled_together_as_far_as_the_budget_goes(pair: Pair, budget: int) -> None:
    pair.lane.is_lent = True
    pair.client.sendall(b"".join(data(bytes([number]), 1) for number in range(20)))
    pair.connection.frame_budget = budget
    assert pair.connection.io.fill_nonblocking()
    assert pair.connection._take_run(64) == min(budget, 20)
    assert pair.connection.frame_budget == max(budget - 20, 0)


def test_data_amid_a_header_block_closes_the_connection(pair: Pair) -> None:
    pair.read(data(prefixed(bytes(10)), 1))
    with pytest.raises(ProtocolError, match="inside a header block"):
        pair.read(frames.frame(frames.HEADERS, 0, 3, b"\x82"), data(bytes(10), 1))


def test_a_thread_takes_its_memory_back_before_it_gives_up(pair: Pair) -> None:
    received = receiving(pair, bytes(200_000))
    pair.lane.lose("it is given up")
    wait_until(lambda: pair.loop.has_any)
    assert not received.done()  # the connection may fill its memory still
    pair.loop.run()
    assert isinstance(received.exception(), PeerGoneError)
    assert pair.lane.target is None


def test_frames_that_have_arrived_together_are_delivered_together(pair: Pair) -> None:
    pair.lane.is_lent = True
    pair.read(data(prefixed(bytes(10)), 1), *(data(bytes([number]), 1) for number in range(20)))
    assert len(pair.lane._events) == 1
    pair.lane.handle_frame()
    pair.lane.buffer_data_frame()
    assert bytes(pair.call.receive_buffer) == prefixed(bytes(10)) + bytes(range(20))


@pytest.mark.parametrize("beyond", ["stream", "connection"])
def test_frames_that_together_overrun_a_window_close_the_connection(pair: Pair, beyond: str) -> None:
    pair.read(data(prefixed(bytes(10)), 1))
    (relay,) = pair.connection._streams.values()
    if beyond == "stream":
        relay.receive_window = 99
    else:
        pair.connection._receive_window = 99
    with pytest.raises(ProtocolError, match=f"DATA overruns the .*{beyond}"):
        pair.read(*(data(bytes(10), 1) for _ in range(10)))


def test_a_wait_is_not_too_long_while_something_moves(pair: Pair) -> None:
    lane, looks = pair.lane, itertools.count()
    lane._wait_s, lane.io.waits = 0.001, 3

    def moves() -> bool:
        lane.io.moved += 1
        return next(looks) == 20

    lane._wait(moves, "receiving")
    with pytest.raises(TimeoutError):
        lane._wait(lambda: False, "receiving")


def test_a_call_that_has_begun_to_arrive_has_no_size_to_be_found(pair: Pair) -> None:
    message = prefixed(b"\0" + (2**20).to_bytes(4, "big") + bytes(100_000))  # after its size comes what looks like one
    with ExitStack() as opened:
        pair = Pair(opened, data(message[: PREFIX.size], 1))
        pair.read(data(message[PREFIX.size : 10_000], 1))
        assert pair.lane.target is None
        assert not pair.lane.expects_whole


def test_frames_are_no_longer_than_the_client_takes(pair: Pair) -> None:
    assert pair.finish(pair.send(LARGE)) is None
    received = pair.client.makefile("rb")
    sizes: list[int] = []
    while sum(sizes) < len(LARGE):
        length, kind, _, _ = frames.parse_header(received.read(frames.HEADER_NBYTES), 0)
        received.read(length)
        sizes += [length] if kind == frames.DATA else []
    assert max(sizes) == frames.MIN_FRAME_SIZE


def test_what_arrived_with_its_call_counts_as_unread_until_it_is_read(pair: Pair) -> None:
    message = prefixed(bytes(20_000))
    parts = [message[:15_000], message[15_000:]]
    [(lane, call)], _, _ = pair.read(headers("/call", 3), data(parts[0], 3), data(parts[1], 3, end=True))
    assert call.is_fully_received
    assert lane.unread == len(message)
    assert call.receive_message() == 20_000
    call.read(20_000)
    assert lane.unread == 0


def test_a_lane_is_not_told_of_windows(pair: Pair) -> None:
    pair.lane.is_lent = True  # so it keeps what it is told
    setting = frames.settings({frames.INITIAL_WINDOW_SIZE: 1000})[frames.HEADER_NBYTES :]
    pair.read(frames.frame(frames.SETTINGS, 0, 0, setting * 100), *[frames.window_update(0, 1)] * 10)
    assert not pair.lane._events
    assert pair.call.send_room == 1000


def test_what_a_lane_moves_is_counted_in_both_directions(pair: Pair) -> None:
    pair.lane._wait_s = 2 * TIMEOUT_S  # only a wake-up ends a wait
    assert pair.finish(pair.send(LARGE)) is None
    sent = pair.lane.io.moved
    assert sent > len(LARGE)
    pair.lane.is_lent = False
    pair.read(data(bytes(1000), 1))
    assert pair.lane.io.moved == sent + 1000


def test_the_end_of_a_connection_ends_the_waits_of_its_lanes(pair: Pair) -> None:
    pair.lane._wait_s = 2 * TIMEOUT_S  # only a wake-up ends a wait
    pair.connection.send_window = 0
    sent = pair.send(LARGE)
    pair.loop.run()
    pair.connection.close()
    assert isinstance(pair.finish(sent), PeerGoneError)
