"""What client and server calls share: gRPC messages in DATA frames (PROTOCOL-HTTP2.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from struct import Struct
from typing import ClassVar, NoReturn, TypeVar

from bngrad_wire.http2 import frames
from bngrad_wire.http2.connection import BaseConnection
from bngrad_wire.http2.errors import ErrorCode, RpcError, Status
from bngrad_wire.http2.frames import Buffer
from bngrad_wire.http2.stream import Stream

PREFIX = Struct(">BI")
_MAX_MESSAGES = 8
Bytes = TypeVar("Bytes", bytes, bytearray)
_SMALL_NBYTES = 16 * 1024
"""Messages up to this size are copied into one piece; they also fit one frame of any peer."""
_LARGE_NBYTES = 2**18
_LARGE_FRAMES_NBYTES = 2**16
"""A peer that sends a message of this size may send the next ones in large frames, which cost less."""
_MAX_OUTBOUND_PIECES = 64
_PART_NBYTES = 4 * 2**20
"""Longer messages are sent in frames of at most this size, one after the other, so that their progress can be seen, and
that no more is sent of a call that the peer has ended."""
_READ_NBYTES = 256 * 1024
"""`BaseCall.read` takes memory in steps of this."""
MAX_BUFFERED_NBYTES = 64 * 2**20
"""How much of what a peer sends is buffered while this end waits to send."""


class BaseCall(Stream):
    """One call; messages are sent and received by one thread.

    Attributes:
        remaining: Unread bytes of the current message.
        lends_memory: Whether a peer of this user reads large messages where they lie, see
            `bngrad_wire.http2.sockets.zero_copy`.
    """

    lends_memory: bool
    _lent_from_nbytes: ClassVar[int]
    """Smaller messages take less time copied."""

    def __init__(self, connection: BaseConnection, stream_id: int) -> None:
        super().__init__(stream_id, connection.initial_send_window)
        self._connection = connection
        self._sending_ended = False
        self.remaining = 0

    def send_message(self, *buffers: Buffer, more: bool = False, end: bool = False) -> None:
        """Sends one message: the buffers, one after the other.

        While the peer's window is closed, what the peer sends is buffered, up to 64 MiB. While the socket itself is
        full, nothing is read: if both ends block while they send more than the sockets hold, both time out.

        Args:
            buffers: Not copied where they are large, so they must not change until this method returns, or, on a
                client, until the call has ended.
            more: Whether another message, or the end, follows immediately: a small message may wait for it.
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
        if size <= _SMALL_NBYTES and size <= self.send_window and size <= connection.send_window:
            self.send_window -= size
            connection.send_window -= size
            header = frames.frame_header(size, frames.DATA, frames.END_STREAM if end else 0, self.id)
            connection.outbound.append(b"".join((header, prefix, *buffers)))
        else:
            if size >= _LARGE_NBYTES:
                connection.io.expect_large_messages(are_kept=may_lend)
            end = self._send_large(iter((prefix, *buffers)), size, end) and end
        self._sending_ended = end
        if not more or may_lend or len(connection.outbound) > _MAX_OUTBOUND_PIECES:
            connection.flush()

    def send_all(self, messages: Sequence[Sequence[Buffer]]) -> bool:
        """Sends all messages, each given in pieces, and the end of what this end sends in one frame, if they are small.

        Returns False, and sends nothing, if they are not; raises what `send_message` does.
        """
        connection = self._connection
        parts: list[Buffer] = []
        size = 0
        for pieces in messages:
            nbytes = sum(map(len, pieces))
            parts.append(PREFIX.pack(0, nbytes))
            parts += pieces
            size += PREFIX.size + nbytes
        if size > min(_SMALL_NBYTES, self.send_window, connection.send_window):
            return False
        if self._may_send():
            self._begin_message()
            self.send_window -= size
            connection.send_window -= size
            header = frames.frame_header(size, frames.DATA, frames.END_STREAM, self.id)
            connection.outbound.append(b"".join((header, *parts)))
            self._sending_ended = True
            connection.flush()
        return True

    def _begin_message(self) -> None:
        """Is called before a message is sent."""

    def has_window_for(self, sizes: Sequence[int]) -> bool:
        """Whether the windows have room for messages of these sizes."""
        return sum(sizes) + len(sizes) * PREFIX.size <= self.send_room

    @property
    def send_room(self) -> int:
        """How many bytes the windows have room for, with the prefixes of messages."""
        return min(self.send_window, self._connection.send_window)

    @property
    def is_fully_received(self) -> bool:
        """Whether everything that the peer will send has arrived, so that receiving it does not block."""
        return self.ended and not self._connection.data_left

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

    def receive_message(self) -> int | None:
        """Waits for the next message; skips what was not read of the previous one.

        Returns:
            The length in bytes, or None at the end: the client has half-closed, or the server ended the call with OK.

        Raises:
            RpcError: The call failed, the message is compressed (UNIMPLEMENTED), or cut off (INTERNAL).
            PeerGoneError: The connection is gone.
            ProtocolError: The peer broke the protocol.
            TimeoutError: The socket's timeout passed; the call can only be cancelled.
        """
        self._connection.flush()
        while self.remaining:
            self.read(min(self.remaining, _SMALL_NBYTES))
        if not self._wait_for_data():
            self._finish()
            return None
        prefix = bytearray(PREFIX.size)
        self._fill(memoryview(prefix))
        compressed, size = PREFIX.unpack(prefix)
        if compressed == 1:
            self._reject_message()
            raise RpcError(Status.UNIMPLEMENTED, "the message is compressed, which is not supported")
        if compressed:
            self._fail(f"a message is flagged {compressed}, neither 0 nor 1")
        self.remaining = size
        if size >= _LARGE_FRAMES_NBYTES:
            self._connection.allow_large_frames()
        return int(size)

    def read(self, nbytes: int, beginning: bytes = b"") -> bytes:
        """Waits for the next ``nbytes`` of the message; returns them after ``beginning``, which was read before.

        Takes memory as they arrive; raises as `read_into` does.
        """
        piece = memoryview(bytearray(min(nbytes, _READ_NBYTES)))
        if nbytes <= _READ_NBYTES and not beginning:
            self.read_into(piece)
            return bytes(piece)
        whole = BytesIO()
        whole.write(beginning)
        while nbytes:
            self.read_into(piece)
            whole.write(piece)
            nbytes -= len(piece)
            piece = piece[:nbytes]
        return whole.getvalue()

    def read_into(self, buffer: memoryview) -> None:
        """Fills the buffer with the next bytes of the message; large ones go from the socket straight into it.

        Raises:
            ValueError: The message has fewer bytes left.
            RpcError: The call failed, or ended, before the message was complete.
            PeerGoneError: The connection is gone.
            ProtocolError: The peer broke the protocol.
            TimeoutError: The socket's timeout passed; the call can only be cancelled.
        """
        if len(buffer) > self.remaining:
            raise ValueError(f"{len(buffer)} bytes wanted of a message that has {self.remaining} left")
        self._fill(buffer)
        self.remaining -= len(buffer)

    def took_chunk(self) -> None:
        """See `bngrad_wire.chunks.MessageSource`; the chunk earns its frame, however short it is."""
        self._connection.earn(1, 0)

    def _fill(self, target: memoryview) -> None:
        connection = self._connection
        filled, size = 0, len(target)
        while filled < size:
            if self.receive_buffer:
                count = min(size - filled, len(self.receive_buffer))
                target[filled : filled + count] = self.receive_buffer[:count]
                del self.receive_buffer[:count]
            elif connection.data_left:
                count = connection.read_data_into(target[filled:])
            elif self._wait_for_data():
                continue
            else:
                if self.failure is not None:
                    self._finish()
                self._fail("the call ended amid a message")
            filled += count
            connection.acknowledge_received_data(count, self)

    def _wait_for_data(self) -> bool:
        connection = self._connection
        if connection.stream is not self:
            return False
        while not connection.data_left and not self.receive_buffer:
            if self.ended:
                return False
            connection.handle_frame()
        return True

    def _fail(self, reason: str) -> NoReturn:
        """Fails this call alone, because the peer broke gRPC's framing of messages."""
        self._reject_message()
        raise RpcError(Status.INTERNAL, reason)

    def _finish(self) -> None:
        """Handles the end of what the peer sends."""
        self._check()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()

    def _reject_message(self) -> None:
        """Ends the call before `receive_message` raises for a message that cannot be read."""

    def cancelled(self) -> bool:
        """Returns, without waiting, whether the call has failed or the peer has gone.

        It reads at most 64 KiB ahead, and as many frames as the peer may send for now, so it misses what comes later.
        """
        blocking, self._connection.blocking = self._connection.blocking, False
        try:
            self._connection.handle_available_frames()
            self._connection.flush()
        except (ConnectionError, TimeoutError):
            return True
        finally:
            self._connection.blocking = blocking
        return self.failure is not None


def split_messages(data: Bytes) -> list[Bytes] | None:
    """Splits the content of DATA frames into messages; None if one is compressed or cut off, or if there are many."""
    messages: list[Bytes] = []
    position, end = 0, len(data)
    while position < end:
        start = position + PREFIX.size
        if start > end:
            return None
        compressed, nbytes = PREFIX.unpack_from(data, position)
        position = start + nbytes
        if compressed or position > end or len(messages) == _MAX_MESSAGES:
            return None
        messages.append(data[start:position])
    return messages
