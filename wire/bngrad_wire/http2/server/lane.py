"""A lane of a connection that carries several calls: one of them, as if it had a connection of its own.

The thread of an event loop alone reads and writes the connection. It delivers to a lane what belongs to its call, which
the owner of the lane handles: the event loop itself, or a thread, which may wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from bngrad_wire.http2 import frames
from bngrad_wire.http2.carrier import Carrier
from bngrad_wire.http2.connection_state import EARNING_SHIFT
from bngrad_wire.http2.errors import RpcError
from bngrad_wire.http2.server.call import WHOLE_NBYTES
from bngrad_wire.http2.server.lane_interfaces import LaneIo, Lanes, Loop, Target
from bngrad_wire.http2.server.outbound import Batch
from bngrad_wire.http2.stream import Stream

_STEP_NBYTES = 2**15
_TARGET_NBYTES = 2**16
"""From this size on, what waits for DATA gives its memory to the event loop."""


class Lane(Carrier):
    """Carries one call.

    Attributes:
        table_size_update: What every header block to be sent must begin with.
        is_lent: Whether a thread owns it, rather than the event loop.
        step_nbytes: The connection is told what was read in steps of at least this.
        target: What the connection fills with the next DATA of the call; for the event loop's thread.
        allowed_nbytes: How much of the call may be received before anything reads it.
    """

    io: LaneIo

    def __init__(self, lanes: Lanes, loop: Loop, wait_s: float, stream_id: int, table_size_update: bytes) -> None:
        """Carries nothing yet.

        Args:
            lanes: The connection.
            loop: Its event loop.
            wait_s: What counts as one of the `waits` of its `Patience`, in seconds.
            stream_id: The number of the call's stream.
            table_size_update: See `Carrier`.
        """
        self.io = LaneIo()
        self.stream = None
        self.outbound = []
        self.blocking = False
        # The connection cuts frames to fit these:
        self.send_window = self.initial_send_window = frames.MAX_WINDOW
        self.max_frame_size = frames.LARGEST_FRAME_SIZE
        self.table_size_update = table_size_update
        self.unanswered_ping = b""
        self.data_left = 0
        self.is_lent = False
        self.step_nbytes = _STEP_NBYTES
        self.target: Target | None = None
        self.allowed_nbytes = WHOLE_NBYTES
        self._whole = bytearray()
        self._earned = self._taken = 0
        self._lanes = lanes
        self._loop = loop
        self._wait_s = wait_s
        self._stream_id = stream_id
        self._delivered_nbytes = self._consumed_nbytes = 0
        self._acknowledged_nbytes = 0  # of what `read_data_into` has just read
        self._is_large = False
        self._has_news = False  # that its owner has to handle
        self._data = memoryview(b"")
        self._events: deque[Callable[[Stream], None]] = deque()
        self._changed = threading.Condition()

    @property
    def send_room(self) -> int:
        """See `Carrier`; for the event loop's thread."""
        return self._lanes.send_room_of(self._stream_id)

    @property
    def answer_room(self) -> int:
        """See `Carrier`; for the event loop's thread."""
        return max(self.send_room, self._lanes.room_to_keep)

    @property
    def unread(self) -> int:
        """How many bytes of DATA the owner has not consumed."""
        return self._delivered_nbytes - self._consumed_nbytes

    def take_earned(self) -> int:
        """Returns how many frames the peer has earned since the last time; for the event loop's thread."""
        earned = self._earned
        new, self._taken = earned - self._taken, earned
        return new

    def deliver(self, data: bytes, *, end: bool) -> None:
        """Delivers DATA; for the event loop's thread, as all methods up to `handle_deliveries`, which must follow."""
        self._delivered_nbytes += len(data)
        self._events.append(partial(self._receive, data, end))
        self._note_news()
        self._close_target()

    def take_whole(self, data: memoryview) -> None:
        """Gives the call all its DATA, before it has an owner."""
        if (stream := self.stream) is not None:
            self._delivered_nbytes += len(data)
            stream.receive_buffer = data
            stream.ended = stream.peer_ended = True

    def fail(self, error: RpcError) -> None:
        """Fails the call, since the peer has reset it, or has to."""
        if (stream := self.stream) is not None:
            stream.failure = stream.failure or error
            self._events.append(self._end_by_reset)
            self._note_news()
            self._close_target()

    def handle_deliveries(self) -> None:
        """Has the owner handle what was delivered since the last time; for the event loop's thread."""
        self._has_news = False
        if self.target is not None:
            return
        if self.is_lent:
            self.wake()
        elif self.io.broken is None:
            self.handle_available_frames()

    def _note_news(self) -> None:
        if not self._has_news:
            self._has_news = True
            self._lanes.has_news(self._stream_id)

    def fill_target(self, nbytes: int) -> None:
        """Takes note that so much of the target was filled."""
        if self.target is not None:
            self.io.moved += nbytes
            self.target.advance(nbytes)
            if not self.target.rest:
                self._close_target()

    def _set_target(self, target: Target) -> None:
        if self._events or self.io.broken is not None:
            target.close()
            self.wake()
        else:
            self.target = target

    def _close_target(self) -> None:
        target, self.target = self.target, None
        if target is not None:
            target.close()
            self._note_news()
            if self._whole:
                self._take_expected(target.filled)

    def expect_whole(self, nbytes: int) -> None:
        """Takes memory for so much of a call that the event loop owns; raises MemoryError if there is none."""
        self._whole = bytearray(nbytes)
        self.target = Target(memoryview(self._whole))
        self.allowed_nbytes = nbytes

    @property
    def expects_whole(self) -> bool:
        """See `Carrier`."""
        return self.allowed_nbytes > WHOLE_NBYTES and not self.is_lent

    def _take_expected(self, nbytes: int) -> None:
        """Gives the call what has arrived of what was expected."""
        whole, self._whole = self._whole, bytearray()
        self._delivered_nbytes += nbytes
        if self.stream is not None:
            self.stream.receive_buffer = memoryview(whole) if nbytes == len(whole) else whole[:nbytes]

    def lend(self) -> None:
        """Gives the lane to a thread, with what has arrived."""
        self._close_target()
        self.is_lent = True

    def wake(self) -> None:
        """Wakes the thread that waits for something, if one does."""
        with self._changed:
            self._changed.notify()

    def lose(self, reason: str) -> None:
        """Ends every wait, since the connection, or the call, is given up; for any thread."""
        self.io.broken = self.io.broken or reason
        self.wake()

    def flush(self) -> None:
        """See `Carrier`; the event loop leaves what the socket does not take to the connection."""
        if not self.outbound:
            return
        pieces, self.outbound = self.outbound, []
        self.send_window = frames.MAX_WINDOW
        if self.stream is not None:
            self.stream.send_window = frames.MAX_WINDOW
        if self._loop.is_current or not self.blocking:
            self._in_loop(partial(self._lanes.send_batch, Batch(pieces, self._was_taken)))
            return
        taken = threading.Event()
        self._loop.call_soon(partial(self._lanes.send_batch, Batch(pieces, self._was_taken, taken)))
        try:
            self._wait(taken.is_set, "sending")
        except BaseException:
            self.io.broken = self.io.broken or "sending timed out"
            self._run_in_loop(partial(self._lanes.withdraw, self._stream_id))
            raise

    def _was_taken(self, nbytes: int, is_last: bool) -> None:
        self.io.moved += nbytes
        if is_last:
            self.wake()

    def append_headers(self, stream_id: int, block: bytes, flags: int) -> None:
        """See `Carrier`; another lane's block may come before, so each one says how large the table is."""
        self.outbound += frames.header_block(stream_id, self.table_size_update + block, flags)

    def _run_in_loop(self, action: Callable[[], None]) -> None:
        """Has the event loop do something that ends its use of this thread's memory, and waits for it."""
        done = threading.Event()

        def run() -> None:
            action()
            done.set()

        self._loop.call_soon(run)
        done.wait()

    def _wait(self, is_over: Callable[[], object], what: str) -> None:
        """Waits as `Patience` says, but at least for what the event loop can do at once."""
        waited, moved = 0, self.io.moved
        with self._changed:
            while not is_over():
                self.io.check()
                if waited >= self.io.waits or (waited and time.monotonic() > self.io.deadline):
                    raise TimeoutError(f"{what} timed out")
                if not self._changed.wait(self._wait_s):
                    waited = waited + 1 if moved == self.io.moved else 1
                    moved = self.io.moved

    def handle_frame(self) -> None:
        """See `Carrier`."""
        if not self._events and time.monotonic() > self.io.deadline:
            raise TimeoutError("receiving timed out")
        self._wait(lambda: self._events, "receiving")
        self._handle_event()

    def handle_available_frames(self) -> None:
        """See `Carrier`."""
        self.io.check()
        while self._events and self._has_room():
            self.buffer_data_frame()
            self._handle_event()
        self.buffer_data_frame()

    def _has_room(self) -> bool:
        return self.stream is None or len(self.stream.receive_buffer) <= self.allowed_nbytes

    def _handle_event(self) -> None:
        event = self._events.popleft()
        if self.stream is not None:
            event(self.stream)

    def _receive(self, data: bytes, end: bool, stream: Stream) -> None:
        if not stream.ended:
            self.io.moved += len(data)
            self._data, self.data_left = memoryview(data), len(data)
            stream.ended = end
        stream.peer_ended = stream.peer_ended or end

    def _end_by_reset(self, stream: Stream) -> None:
        stream.ended = stream.peer_ended = stream.reset = True
        stream.receive_buffer = bytearray()
        self._data, self.data_left = memoryview(b""), 0

    def read_data_into(self, target: memoryview) -> int:
        """See `Carrier`."""
        count = min(self.data_left, len(target))
        target[:count] = self._data[:count]
        self._data = self._data[count:]
        self.data_left -= count
        rest = target[count:]
        may_come = self.stream is not None and not self.stream.ended
        if len(rest) >= _TARGET_NBYTES and may_come and not (self._events or self._loop.is_current):
            self.acknowledge_received_data(count, self.stream)
            count += self._wait_for_filled(rest)
            self._acknowledged_nbytes = count
        return count

    def _wait_for_filled(self, memory: memoryview) -> int:
        """Has the event loop fill memory with DATA, and returns how much was filled before something else came."""
        target = Target(memory)
        self._loop.call_soon(partial(self._set_target, target))
        try:
            self._wait(lambda: not target.rest, "receiving")
        except BaseException:
            self._run_in_loop(self._close_target)
            raise
        return target.filled

    def buffer_data_frame(self) -> None:
        """See `Carrier`."""
        if self.stream is not None and self.data_left:
            received = self.stream.receive_buffer
            self.stream.receive_buffer = bytearray(received) if isinstance(received, memoryview) else received
            self.stream.receive_buffer += self._data
            self._data, self.data_left = memoryview(b""), 0

    def acknowledge_received_data(self, nbytes: int, stream: Stream | None) -> None:
        """See `Carrier`."""
        nbytes, self._acknowledged_nbytes = nbytes - self._acknowledged_nbytes, 0
        self._consumed_nbytes += nbytes
        self.io.check()  # once the connection is lost, the rest of what was delivered is of no use
        if stream is None:
            return
        stream.unacknowledged += nbytes
        if stream.unacknowledged >= self.step_nbytes:
            consumed, stream.unacknowledged = stream.unacknowledged, 0
            self._in_loop(partial(self._lanes.consume, stream.id, consumed, is_large=self._is_large))

    def allow_large_frames(self) -> None:
        """See `Carrier`; here, the window becomes larger, once there is memory for the message: some of it is read."""
        self._is_large = True

    def earn(self, nbytes: int, shift: int = EARNING_SHIFT) -> None:
        """See `Carrier`."""
        self._earned += nbytes >> shift

    def close_stream(self, stream: Stream) -> None:
        """See `Carrier`; the event loop forgets it once it has the lane back."""
        self.stream = None
        self._data, self.data_left = memoryview(b""), 0

    def release(self) -> None:
        """Forgets the call and what was delivered, once nothing uses the lane: it would refer to itself."""
        self.stream = self.target = None
        self._events.clear()

    def ping(self) -> None:
        """Does nothing: nothing was lent."""

    def _in_loop(self, callback: Callable[[], None]) -> None:
        if self._loop.is_current:
            callback()
        else:
            self._loop.call_soon(callback)
