"""A connection that relays what its lanes send and receive: one half of `MultiplexedConnection`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.sending import PREFIX
from bngrad_wire.http2.server.call import WHOLE_NBYTES
from bngrad_wire.http2.server.connection import ServerConnection
from bngrad_wire.http2.server.lane import Lane
from bngrad_wire.http2.server.lane_interfaces import Loop
from bngrad_wire.http2.server.outbound import Batch, OutboundQueue, Part
from bngrad_wire.http2.server.relay import Relay, Uploads
from bngrad_wire.http2.stream import Stream

WINDOW_NBYTES = WHOLE_NBYTES
"""How much of a call is received before its owner reads it."""
_LARGE_WHOLE_NBYTES = 2**22 + 2**16
"""How large a call may be of which more is received, since memory for all of it was taken."""
LARGE_WINDOW_NBYTES = 2**20
"""By how much the window of any other large message grows once its owner reads it."""
MAX_ENLARGED = 1
"""For how many calls at a time."""
_LARGE_STEP_NBYTES = 2**18
"""In which steps such a window is restored."""
_SENT_NBYTES = 2**18
"""About how much is sent with one system call."""
_PIECE_NBYTES = 2**16
"""How much is delivered at once: of a call without memory, its owner gets at least the beginning, and can refuse it."""
_DIRECT_NBYTES = 2**16
"""How much of a frame is received on its own: less comes with the next ones, with fewer system calls."""
_TURN_NBYTES = 2**16
"""How much DATA of a stream is sent before others have their turn."""


class RelayingConnection(ServerConnection):
    """Sends what lanes give it, as far as the client takes it, and delivers to them what belongs to their calls.

    Attributes:
        is_corked: Whether what lanes send waits for `flush`.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.is_corked = False
        self._moved_nbytes = 0  # of DATA of running calls, until the end of the next `MultiplexedConnection.read`
        self._loop: Loop | None = None
        self._uploads = Uploads(0, 0)
        self._on_change: Callable[[], None] = lambda: None
        self._streams: dict[int, Stream] = {}
        self._enlarged: set[int] = set()  # the streams with large windows
        self._queue = OutboundQueue()
        self._receiving: Relay | None = None  # that the current DATA frame belongs to
        self._sending: list[Part] = []
        self._cut_frame = b""  # the rest of what the socket did not take

    @property
    def is_multiplexed(self) -> bool:
        """Whether it carries several calls at a time."""
        return self._loop is not None

    @property
    def is_cut(self) -> bool:
        """Whether the socket did not take all that it was given: the rest waits until it is writable."""
        return bool(self._cut_frame)

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the client takes it."""
        return bool(self._cut_frame or self.outbound or self._queue)

    @property
    def unsent_nbytes(self) -> int:
        """How much waits until the client takes it, and will not be sent otherwise."""
        return len(self._cut_frame) + self._queue.kept_nbytes

    def close(self) -> None:
        """See `ConnectionState`; ends the waits of all lanes."""
        super().close()
        self._lose_lanes()
        for stream in self._streams.values():
            if isinstance(stream, Relay):
                self._uploads.leave(stream)
        self._streams.clear()
        self._queue.clear()

    def _lose_lanes(self) -> None:
        for lane in self._lanes():
            lane.lose(self.io.broken or "it was closed")

    def _lanes(self) -> Iterator[Lane]:
        return (stream.lane for stream in self._streams.values() if isinstance(stream, Relay))

    def send_room_of(self, stream_id: int) -> int:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`."""
        stream = self._streams.get(stream_id)
        if self._cut_frame or stream is None:
            return 0
        return min(
            self.send_window - self._queue.data_nbytes, stream.send_window - self._queue.data_nbytes_of(stream_id)
        )

    def send_batch(self, batch: Batch) -> None:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`."""
        stream = self._streams.get(batch.stream_id)
        if stream is None or stream.reset:
            batch.drop()
        elif self.io.broken is None:
            self._queue.add(batch)
            self._flush_for_lanes()

    def withdraw(self, stream_id: int) -> None:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`."""
        self._queue.withdraw(stream_id)

    def consume(self, stream_id: int, nbytes: int, *, is_large: bool) -> None:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`; allows the client to send as much again.

        It goes on to read what was left in the socket, where too much was unread, also if the client has sent all of
        the call: it may have sent what the answer waits for.
        """
        stream = self._streams.get(stream_id)
        if not isinstance(stream, Relay):
            return
        if not stream.peer_ended:
            if is_large and stream_id not in self._enlarged and len(self._enlarged) < MAX_ENLARGED:
                self._enlarged.add(stream_id)
                stream.lane.step_nbytes = _LARGE_STEP_NBYTES
                nbytes += LARGE_WINDOW_NBYTES
            if stream_id in self._enlarged:
                self.io.enlarge()
            self._open_window(stream, nbytes)
        self._on_change()

    def _open_window(self, relay: Relay, nbytes: int) -> None:
        """Allows the client to send more of a call."""
        relay.receive_window += nbytes
        self.outbound.append(frames.window_update(relay.id, nbytes))
        self._flush_for_lanes()

    def _flush_for_lanes(self) -> None:
        if self.is_corked:
            return
        try:
            self.flush()
        except Exception as error:  # the next `read` says so
            self.io.broken = self.io.broken or f"sending failed: {error or type(error).__name__}"
            self._lose_lanes()
        if self.is_cut:
            self._on_change()

    def flush(self) -> None:
        """See `Carrier`; after `multiplex`, sends what the socket takes."""
        if not self.is_multiplexed:
            super().flush()
            return
        while pieces := self._next_pieces():
            self._cut_frame = self.io.send(pieces, blocking=False)
            self._is_frame_cut = bool(self._cut_frame)
            sent, self._sending = self._sending, []
            for part in sent:
                part.was_sent()
            if self._cut_frame:
                return

    def _next_pieces(self) -> list[Buffer]:
        """Takes what is to be sent next: no piece is needed after the next call of `BufferedSocket.send`."""
        if self._cut_frame:
            return [self._cut_frame]
        pieces, self.outbound = self.outbound, []
        nbytes, queue = 0, self._queue
        waiting = 0  # how many streams in a row had to wait for a window
        while waiting < len(queue) and nbytes < _SENT_NBYTES:
            stream_id = queue.next_turn()
            part = self._next_part(stream_id, self._streams.get(stream_id))
            waiting = waiting + 1 if part is None else 0
            if part is not None:
                pieces += part.pieces
                nbytes += part.data_nbytes
                self._sending.append(part)
        return pieces

    def _next_part(self, stream_id: int, stream: Stream | None) -> Part | None:
        """Takes what a stream is to send next and windows have room for; of a call that has ended, all has room."""
        room = min(self.send_window, _TURN_NBYTES)
        if stream is not None:
            room = min(room, stream.send_window)
        part = self._queue.take(stream_id, room, self.max_frame_size)
        if part is not None:
            self.send_window -= part.data_nbytes
            self._moved_nbytes += part.data_nbytes
            if stream is not None:
                stream.send_window -= part.data_nbytes
                if part.ends_stream and isinstance(stream, Relay):
                    stream.is_answered = True
        return part

    def charge(self, frame_count: int) -> None:
        """See `ConnectionState`."""
        if self.frame_budget < frame_count:
            for lane in self._lanes():
                self.earn(lane.take_earned(), 0)
        super().charge(frame_count)

    def _handle_window_update(self, stream_id: int, increment: int) -> None:
        super()._handle_window_update(stream_id, increment)
        for stream in [self._streams.get(stream_id)] if stream_id else list(self._streams.values()):
            self._window_opened(stream)

    def _window_opened(self, stream: Stream | None) -> None:
        if stream is not None and not isinstance(stream, Relay):  # lanes do not look at windows
            stream.progressed()

    def _set_initial_send_window(self, value: int) -> None:
        change = value - self.initial_send_window
        super()._set_initial_send_window(value)
        for stream in list(self._streams.values()):
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS makes a stream's window too large")
            self._window_opened(stream)

    def _deliver_data(self) -> None:
        """Delivers what has arrived of the current DATA frame."""
        relay = self._receiving
        if relay is None:
            return
        if relay.lane.target is not None:
            self._fill_target(relay, relay.lane.target.rest[: self.data_left])
        while self._deliver_piece(relay):
            pass
        if not self.data_left:
            self._receiving = None

    def _deliver_piece(self, relay: Relay) -> bool:
        """Delivers some of what has arrived of the current DATA frame; returns whether there may be more of it."""
        io = self.io
        count = min(self.data_left, io.high - io.low, _PIECE_NBYTES)
        ends = relay.ended and count == self.data_left
        if count or ends:
            # First, so that all is as before if there is no memory for it.
            data = bytes(memoryview(io.buffer)[io.low : io.low + count])
            io.low += count
            self._took_data(count)
            relay.lane.deliver(data, end=ends)
        return count == _PIECE_NBYTES and not ends

    def _fill_target(self, relay: Relay, memory: memoryview) -> None:
        """Fills what a lane waits to have filled, as far as DATA has arrived."""
        io = self.io
        while (io.high > io.low or len(memory) >= _DIRECT_NBYTES) and (count := io.read_available_into(memory)):
            memory = memory[count:]
            self._took_data(count)
            self._filled_target(relay, count)

    def _take_run(self, most: int) -> int:
        """Delivers DATA frames of a call that have arrived whole, at less cost than one by one.

        A frame that begins or ends a call, or breaks a rule, is left to `handle_frame`. Returns how many frames, of at
        most so many, it delivered.
        """
        io, relay, room = self.io, None, 0
        position, view = io.low, memoryview(io.buffer)
        contents: list[memoryview] = []
        while len(contents) < most and position + frames.HEADER_NBYTES <= io.high:
            length, kind, flags, stream_id = frames.parse_header(io.buffer, position)
            start = position + frames.HEADER_NBYTES
            if relay is None:
                stream = self._streams.get(stream_id)
                if not isinstance(stream, Relay) or not stream.may_run or self._partial_block is not None:
                    break
                relay, target = stream, stream.lane.target
                room = _PIECE_NBYTES if target is None else len(target.rest)
            room -= length
            if kind != frames.DATA or flags or stream_id != relay.id or room < 0 or start + length > io.high:
                break
            position = start + length
            contents.append(view[start:position])
        has_delivered = relay is not None and bool(contents) and self._deliver_run(relay, contents, position)
        return len(contents) if has_delivered else 0

    def _deliver_run(self, relay: Relay, contents: list[memoryview], end: int) -> bool:
        """Delivers the DATA of frames, which end there; returns False, and does nothing, beyond windows or budget."""
        target, nbytes = relay.lane.target, sum(map(len, contents))
        data = b"".join(contents) if target is None else b""  # first, as in `_deliver_piece`
        if not self.account_for_frames(relay, len(contents), 0, nbytes):
            return False
        self.io.low = end
        self._moved_nbytes += nbytes
        super().acknowledge_received_data(nbytes, None)
        if data:
            relay.lane.deliver(data, end=False)
        elif target is not None:
            for content in contents:
                target.rest[: len(content)] = content
                self._filled_target(relay, len(content))
        return True

    def _filled_target(self, relay: Relay, nbytes: int) -> None:
        relay.lane.fill_target(nbytes)
        if relay.lane.is_lent:
            self._consume_here(relay, nbytes, is_large=True)

    def _consume_here(self, relay: Relay, nbytes: int, *, is_large: bool) -> None:
        """Does as `consume`, in steps, for DATA that the lane's owner does not read."""
        relay.unacknowledged += nbytes
        if relay.unacknowledged >= relay.lane.step_nbytes:
            consumed, relay.unacknowledged = relay.unacknowledged, 0
            self.consume(relay.id, consumed, is_large=is_large)

    def _discard_rest(self, relay: Stream) -> None:
        """Discards the rest of the current DATA frame if it belongs to a call that has ended."""
        if relay is self._receiving:
            self._receiving = None
            self._skip_left += self.data_left
            rest, self.data_left = self.data_left, 0
            super().acknowledge_received_data(rest, None)

    def _took_data(self, nbytes: int) -> None:
        self._moved_nbytes += nbytes
        self.data_left -= nbytes
        super().acknowledge_received_data(nbytes, None)

    def acknowledge_received_data(self, nbytes: int, stream: Stream | None) -> None:
        """See `Carrier`; of a lane's call, it is called for padding, as the lane restores the rest."""
        if isinstance(stream, Relay):
            self._consume_here(stream, nbytes, is_large=False)
            stream = None
        super().acknowledge_received_data(nbytes, stream)

    def _handle_data(self, length: int, flags: int, stream_id: int) -> None:
        stream = self.known_stream(stream_id)
        was_open = isinstance(stream, Relay) and not stream.ended
        super()._handle_data(length, flags, stream_id)
        if was_open and isinstance(stream, Relay) and not stream.reset:
            self._receiving = stream
            if not stream.has_begun:
                stream.has_begun = True
                self._expect_whole(stream)

    def _expect_whole(self, relay: Relay) -> None:
        """Receives a call whole although it is large, if there is room for it: then it needs no thread."""
        io, uploads = self.io, self._uploads
        if relay.lane.is_lent or min(self.data_left, io.high - io.low) < PREFIX.size:
            return
        nbytes = PREFIX.size + PREFIX.unpack_from(io.buffer, io.low)[1]
        if WINDOW_NBYTES < nbytes <= min(_LARGE_WHOLE_NBYTES, uploads.free_nbytes):
            with suppress(MemoryError):
                relay.lane.expect_whole(nbytes)
                if self.data_left <= frames.MIN_FRAME_SIZE:
                    io.enlarge()
                relay.taken_nbytes = nbytes
                uploads.free_nbytes -= nbytes
                self._open_window(relay, nbytes - WINDOW_NBYTES)
