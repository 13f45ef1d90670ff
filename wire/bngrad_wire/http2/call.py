"""What client and server calls share: gRPC messages in DATA frames (PROTOCOL-HTTP2.md)."""

from __future__ import annotations

from typing import NoReturn

from bngrad_wire.fields import Buffer
from bngrad_wire.http2.carrier import Carrier
from bngrad_wire.http2.errors import RpcError, Status
from bngrad_wire.http2.sending import PREFIX, SendingStream

_MAX_MESSAGES = 8
_LARGE_FRAMES_NBYTES = 2**16
"""A peer that sends a message of this size may send the next ones in large frames, which cost less."""
_SKIPPED_NBYTES = 16 * 1024


class BaseCall(SendingStream):
    """One call; messages are sent and received by one thread.

    Attributes:
        remaining: Unread bytes of the current message.
    """

    def __init__(self, connection: Carrier, stream_id: int) -> None:
        super().__init__(connection, stream_id)
        self.remaining = 0

    @property
    def is_fully_received(self) -> bool:
        """Whether everything that the peer will send has arrived, so that receiving it does not block."""
        return self.ended and not self._connection.data_left

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
            self.read(min(self.remaining, _SKIPPED_NBYTES))
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

    def read(self, nbytes: int) -> bytes:
        """Waits for the next ``nbytes`` of the message, and returns them; raises as `read_into` does."""
        if isinstance(self.receive_buffer, memoryview) and nbytes <= len(self.receive_buffer):
            return self._read_received(nbytes)
        data = bytearray(nbytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def _read_received(self, nbytes: int) -> bytes:
        self._check_left(nbytes)
        data = bytes(self.receive_buffer[:nbytes])
        self._drop_received(nbytes)
        self._connection.acknowledge_received_data(nbytes, self)
        self.remaining -= nbytes
        return data

    def read_into(self, buffer: memoryview) -> None:
        """Fills the buffer with the next bytes of the message; large ones go from the socket straight into it.

        Raises:
            ValueError: The message has fewer bytes left.
            RpcError: The call failed, or ended, before the message was complete.
            PeerGoneError: The connection is gone.
            ProtocolError: The peer broke the protocol.
            TimeoutError: The socket's timeout passed; the call can only be cancelled.
        """
        self._check_left(len(buffer))
        self._fill(buffer)
        self.remaining -= len(buffer)

    def _check_left(self, nbytes: int) -> None:
        if nbytes > self.remaining:
            raise ValueError(f"{nbytes} bytes wanted of a message that has {self.remaining} left")

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
                self._drop_received(count)
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

    def _drop_received(self, nbytes: int) -> None:
        if isinstance(self.receive_buffer, memoryview):
            self.receive_buffer = self.receive_buffer[nbytes:]
        else:
            del self.receive_buffer[:nbytes]

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


def split_messages(data: Buffer) -> list[Buffer] | None:
    """Splits the content of DATA frames into messages; None if one is compressed or cut off, or if there are many.

    Those of a memoryview are not copied.
    """
    messages: list[Buffer] = []
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
