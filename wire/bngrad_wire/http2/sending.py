"""The half of a call that sends: gRPC messages in DATA frames, in one piece or without being copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import ClassVar

from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames
from bngrad_wire.http2.carrier import Carrier
from bngrad_wire.http2.errors import ErrorCode, RpcError, Status
from bngrad_wire.http2.stream import Stream

PREFIX = Struct(">BI")
_SMALL_NBYTES = 16 * 1024
"""Messages up to this size are copied into one piece; they also fit one frame of any peer."""
_LARGE_NBYTES = 2**18
_MAX_OUTBOUND_PIECES = 64
_PART_NBYTES = 4 * 2**20
"""Longer messages are sent in frames of at most this size, one after the other, so that their progress can be seen, and
that no more is sent of a call that the peer has ended."""
MAX_BUFFERED_NBYTES = 64 * 2**20
"""How much of what a peer sends is buffered while this end waits to send."""


class SendingStream(Stream):
    """A stream that sends messages.

    Attributes:
        lends_memory: Whether a peer of this user reads large messages where they lie, see
            `bngrad_wire.http2.sockets.zero_copy`.
    """

    lends_memory: bool
    _lent_from_nbytes: ClassVar[int]
    """Smaller messages take less time copied."""

    def __init__(self, connection: Carrier, stream_id: int) -> None:
        super().__init__(stream_id, connection.initial_send_window)
        self._connection = connection
        self._sending_ended = False

    def send_message(self, *buffers: Buffer, more: bool = False, end: bool = False) -> None:
        """Sends one message: the buffers, one after the other.

        While the peer's window is closed, what the peer sends is buffered, up to 64 MiB. While the socket itself is
        full, nothing is read: if both ends block while they send more than the sockets hold, both time out.

        Args:
            buffers: Not copied where they are large, so they must not change until this method returns, or, on a
                client, until the call has ended.
            more: Whether another message, or the end, follows immediately: this one may wait for it, so its buffers
                must not change until that has been sent.
            end: Whether this is the last message (a client half-closes the call).

        Raises:
            RpcError: The call has ended with a status other than OK, or the peer sent too much meanwhile.
            PeerGoneError: The connection is gone.
            ProtocolError: The peer broke the protocol.
            TimeoutError: The socket's timeout passed.
        """
        if not self._may_send():
            return
        connection = self._connection
        size = sum(map(len, buffers))
        prefix = PREFIX.pack(0, size)
        size += len(prefix)
        may_lend = self.lends_memory and size >= self._lent_from_nbytes
        self._begin_message()
        if self._fits_one_frame(size):
            self._append_frame((prefix, *buffers), size, frames.END_STREAM if end else 0)
        else:
            if size >= _LARGE_NBYTES:
                connection.io.expect_large_messages(are_kept=may_lend)
            end = self._send_large(iter((prefix, *buffers)), size, end) and end
        self._sending_ended = end
        if not more or may_lend or len(connection.outbound) > _MAX_OUTBOUND_PIECES:
            connection.flush()

    def send_all(self, messages: Sequence[Sequence[Buffer]]) -> bool:
        """Sends all messages, each given in pieces, and the end of what this end sends in one frame, if that may be.

        Returns False, and sends nothing, if they are too large for it; raises what `send_message` does.
        """
        connection = self._connection
        parts: list[Buffer] = []
        size = 0
        for pieces in messages:
            nbytes = sum(map(len, pieces))
            parts.append(PREFIX.pack(0, nbytes))
            parts += pieces
            size += PREFIX.size + nbytes
        if not self._fits_one_frame(size):
            return False
        if self._may_send():
            self._begin_message()
            self._append_frame(parts, size, frames.END_STREAM)
            self._sending_ended = True
            connection.flush()
        return True

    def _fits_one_frame(self, size: int) -> bool:
        """Whether messages of this size may be sent in one frame, which then takes less time."""
        connection = self._connection
        return size < _LARGE_NBYTES and size <= min(connection.max_frame_size, self.send_window, connection.send_window)

    def _append_frame(self, parts: Sequence[Buffer], size: int, flags: int) -> None:
        """Appends a frame with DATA that `_fits_one_frame` to what is to be sent."""
        connection = self._connection
        self.send_window -= size
        connection.send_window -= size
        header = frames.frame_header(size, frames.DATA, flags, self.id)
        if size <= _SMALL_NBYTES:
            connection.outbound.append(b"".join((header, *parts)))
        else:
            connection.earn(size)  # the peer opens its window for it
            connection.outbound += (header, *parts)

    def _begin_message(self) -> None:
        """Is called before a message is sent."""

    def has_window_for(self, sizes: Sequence[int]) -> bool:
        """Whether the windows have room for messages of these sizes."""
        return self.sent_nbytes(sizes) <= self.send_room

    @staticmethod
    def sent_nbytes(sizes: Sequence[int]) -> int:
        """Returns how many bytes messages of these sizes have, with their prefixes."""
        return sum(sizes) + len(sizes) * PREFIX.size

    @property
    def send_room(self) -> int:
        """How many bytes the windows have room for, with the prefixes of messages."""
        return min(self.send_window, self._connection.send_room)

    def _may_send(self) -> bool:
        """Returns False if the peer accepts no more messages although the call did not fail."""
        self._check()
        if self._sending_ended:
            raise RuntimeError("the sending side of this call has ended")
        return True

    def _send_large(self, buffers: Iterator[Buffer], size: int, end: bool) -> bool:
        """Sends a large message; returns False if the peer ended the call before all of it was sent."""
        connection = self._connection
        view = memoryview(b"")
        while size:
            room = min(size, _PART_NBYTES, connection.max_frame_size, connection.send_window, self.send_window)
            if room <= 0:
                connection.flush()
                if not self._wait_for_window():
                    return False
                continue
            self.send_window -= room
            connection.send_window -= room
            connection.earn(room)  # The peer opens its window for it.
            size -= room
            framed = room
            flags = frames.END_STREAM if end and not size else 0
            connection.outbound.append(frames.frame_header(room, frames.DATA, flags, self.id))
            while room:
                while not view:
                    view = memoryview(next(buffers))
                part, view = view[:room], view[room:]
                room -= len(part)
                connection.outbound.append(part)
            if framed == _PART_NBYTES or len(connection.outbound) >= _MAX_OUTBOUND_PIECES:
                connection.flush()
                if size:
                    connection.io.check_deadline()
                    if not self._may_send_more():
                        return False
        return True

    def _may_send_more(self) -> bool:
        """Sees whether the peer allows larger frames meanwhile, or has ended the call."""
        self._connection.handle_available_frames()
        return self._may_send()

    def _wait_for_window(self) -> bool:
        return self._handle_frames_while(lambda: self.send_window <= 0 or self._connection.send_window <= 0)

    def _handle_frames_while(self, is_waiting: Callable[[], object]) -> bool:
        """Handles what the peer sends while this end waits; returns False if the peer ended the call meanwhile."""
        connection = self._connection
        while is_waiting():
            if len(self.receive_buffer) + connection.data_left > MAX_BUFFERED_NBYTES:
                self._reset(ErrorCode.ENHANCE_YOUR_CALM)
                reason = f"the peer sent {MAX_BUFFERED_NBYTES} bytes and did not take the response"
                self.failure = RpcError(Status.RESOURCE_EXHAUSTED, reason)
                self._check()
            connection.buffer_data_frame()
            connection.handle_frame()
            if not self._may_send():
                return False
        return True

    def _reset(self, code: ErrorCode) -> None:
        connection = self._connection
        if connection.stream is self:
            connection.outbound.append(frames.rst_stream(self.id, code))
            connection.close_stream(self)
            connection.flush()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()
