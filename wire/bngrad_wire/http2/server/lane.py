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
from typing import Protocol

from bngrad_wire.http2 import frames
from bngrad_wire.http2.carrier import Carrier
from bngrad_wire.http2.connection_state import EARNING_SHIFT
from bngrad_wire.http2.errors import RpcError
from bngrad_wire.http2.server.call import WHOLE_NBYTES
from bngrad_wire.http2.server.outbound import LARGEST_FRAME_NBYTES, Batch
from bngrad_wire.http2.sockets.patience import Patience
from bngrad_wire.http2.stream import Stream

_STEP_NBYTES = 2**15


class Loop(Protocol):
    """The event loop of the connection."""

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the event loop's."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Runs a callback in its thread; any thread may call this."""


class Lanes(Protocol):
    """What a lane asks of its connection; for the event loop's thread."""

    @property
    def send_room(self) -> int:
        """How many bytes of DATA can be sent at once."""

    def send_batch(self, batch: Batch) -> None:
        """Sends frames after those before them, as soon as the peer takes them."""

    def withdraw(self, stream_id: int) -> None:
        """Sends no more frames of a stream."""

    def consume(self, stream_id: int, nbytes: int, *, is_large: bool) -> None:
        """Takes note that DATA was read of a stream, which carries a large message or does not."""


class LaneIo(Patience):
    """The limits of a lane's waits. Nothing is lent to its socket: whatever is sent has been copied."""

    has_lent = False

    def expect_large_messages(self, *, are_kept: bool) -> None:
        """Does nothing: the socket is shared by calls of all sizes."""


class Lane(Carrier):
    """Carries one call.

    Attributes:
        table_size_update: What every header block to be sent must begin with.
        is_lent: Whether a thread owns it, rather than the event loop.
        step_nbytes: The connection is told what was read in steps of at least this.
    """

    io: LaneIo

    def __init__(
        self, lanes: Lanes, loop: Loop, wait_s: float, stream_id: int, *, initial_send_window: int,
        max_frame_size: int, table_size_update: bytes,
    ) -> None:  # fmt: skip
        """Carries nothing yet.

        Args:
            lanes: The connection.
            loop: Its event loop.
            wait_s: What counts as one of the `waits` of its `Patience`, in seconds.
            stream_id: The number of the call's stream.
            initial_send_window: See `Carrier`.
            max_frame_size: Likewise.
            table_size_update: Likewise.
        """
        self.io = LaneIo()
        self.stream = None
        self.outbound = []
        self.blocking = False
        self.send_window = frames.MAX_WINDOW  # the connection looks after its own
        self.initial_send_window = initial_send_window
        self.max_frame_size = min(max_frame_size, LARGEST_FRAME_NBYTES)
        self.table_size_update = table_size_update
        self.unanswered_ping = b""
        self.data_left = 0
        self.is_lent = False
        self.step_nbytes = _STEP_NBYTES
        self._earned = self._taken = 0
        self._lanes = lanes
        self._loop = loop
        self._wait_s = wait_s
        self._stream_id = stream_id
        self._delivered_nbytes = self._consumed_nbytes = 0
        self._is_large = False
        self._data = memoryview(b"")
        self._events: deque[Callable[[Stream], None]] = deque()
        self._changed = threading.Condition()

    @property
    def send_room(self) -> int:
        """See `Carrier`; for the event loop's thread."""
        return self._lanes.send_room

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

    def take_whole(self, data: memoryview) -> None:
        """Gives the call all its DATA, before it has an owner."""
        if (stream := self.stream) is not None:
            self._delivered_nbytes += len(data)
            stream.receive_buffer = data
            stream.ended = stream.peer_ended = True

    def open_window(self, nbytes: int) -> None:
        """Allows the call to send more, or less."""
        self._events.append(partial(_open_window, nbytes))

    def fail(self, error: RpcError) -> None:
        """Fails the call, since the peer has reset it, or has to."""
        if (stream := self.stream) is not None:
            stream.failure = stream.failure or error
            self._events.append(self._end_by_reset)

    def handle_deliveries(self) -> None:
        """Has the owner handle what was delivered; for the event loop's thread."""
        if self.is_lent:
            self.wake()
        elif self.io.broken is None:
            self.handle_available_frames()

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
        if self._loop.is_current or not self.blocking:
            self._in_loop(partial(self._lanes.send_batch, Batch(pieces, self._was_taken)))
            return
        taken = threading.Event()
        self._loop.call_soon(partial(self._lanes.send_batch, Batch(pieces, self._was_taken, taken)))
        try:
            self._wait(taken.is_set, "sending")
        except BaseException:
            self.io.broken = self.io.broken or "sending timed out"
            self._withdraw()
            raise

    def _was_taken(self, nbytes: int, is_last: bool) -> None:
        self.io.moved += nbytes
        if is_last:
            self.wake()

    def append_headers(self, stream_id: int, block: bytes, flags: int) -> None:
        """See `Carrier`; another lane's block may come before, so each one says how large the table is."""
        self.outbound += frames.header_block(stream_id, self.table_size_update + block, flags)

    def _withdraw(self) -> None:
        """Returns once nothing refers any longer to what was to be sent."""
        withdrawn = threading.Event()

        def withdraw() -> None:
            self._lanes.withdraw(self._stream_id)
            withdrawn.set()

        self._loop.call_soon(withdraw)
        withdrawn.wait()

    def _wait(self, is_over: Callable[[], object], what: str) -> None:
        """Waits as `Patience` says, but at least for what the event loop can do at once."""
        waited = 0
        with self._changed:
            while not is_over():
                self.io.check()
                if waited >= self.io.waits or (waited and time.monotonic() > self.io.deadline):
                    raise TimeoutError(f"{what} timed out")
                if not self._changed.wait(self._wait_s):
                    waited += 1

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
        return self.stream is None or len(self.stream.receive_buffer) < WHOLE_NBYTES

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
        return count

    def buffer_data_frame(self) -> None:
        """See `Carrier`."""
        if self.stream is not None and self.data_left:
            receive_buffer = self.stream.receive_buffer
            assert isinstance(receive_buffer, bytearray)
            receive_buffer += self._data
            self._data, self.data_left = memoryview(b""), 0

    def acknowledge_received_data(self, nbytes: int, stream: Stream | None) -> None:
        """See `Carrier`."""
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
        self.stream = None
        self._events.clear()

    def ping(self) -> None:
        """Does nothing: nothing was lent."""

    def _in_loop(self, callback: Callable[[], None]) -> None:
        if self._loop.is_current:
            callback()
        else:
            self._loop.call_soon(callback)


def _open_window(nbytes: int, stream: Stream) -> None:
    stream.send_window += nbytes
