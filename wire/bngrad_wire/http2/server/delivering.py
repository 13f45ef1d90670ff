"""A connection that delivers to lanes what belongs to their calls."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from bngrad_wire.http2 import frames
from bngrad_wire.http2.sending import PREFIX
from bngrad_wire.http2.server.relay import Relay
from bngrad_wire.http2.server.relaying import WINDOW_NBYTES, RelayingConnection
from bngrad_wire.http2.stream import Stream

_LARGE_WHOLE_NBYTES = 2**22 + 2**16
"""How large a call may be of which more is received, since memory for all of it was taken."""
_PIECE_NBYTES = 2**16
"""How much is delivered at once: of a call without memory, its owner gets at least the beginning, and can refuse it."""
_DIRECT_NBYTES = 2**16
"""From this size on, the rest of a frame is received by itself; less comes with the next ones, in fewer reads."""


class DeliveringConnection(RelayingConnection):
    """Delivers DATA to lanes, or fills with it what they wait to have filled.

    Attributes:
        may_take_memory: Whether memory may be taken now to receive a large call whole.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.may_take_memory: Callable[[], bool] = lambda: True
        self._receiving: Relay | None = None  # that the current DATA frame belongs to

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

        A frame that begins or ends a call, or breaks a rule, is left to `handle_frame`. Returns how many frames were
        delivered, ``most`` at most.
        """
        io, relay, room = self.io, None, 0
        position, view = io.low, memoryview(io.buffer)
        contents: list[memoryview] = []
        most = min(most, self.frame_budget)
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
            is_plain = (
                kind == frames.DATA and not flags and length > 0
            )  # an empty one may follow the end of the message
            if not is_plain or stream_id != relay.id or room < 0 or start + length > io.high:
                break
            position = start + length
            contents.append(view[start:position])
        if relay is None or not contents or not self._deliver_run(relay, contents, position):
            return 0
        return len(contents)

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
        if WINDOW_NBYTES < nbytes <= min(_LARGE_WHOLE_NBYTES, uploads.free_nbytes) and self.may_take_memory():
            with suppress(MemoryError):
                relay.lane.expect_whole(nbytes)
                if self.data_left <= frames.MIN_FRAME_SIZE:
                    io.enlarge()
                relay.taken_nbytes = nbytes
                uploads.free_nbytes -= nbytes
                self._open_window(relay, nbytes - WINDOW_NBYTES)
