"""What carries a call: a connection, or a lane of a connection that carries several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames
from bngrad_wire.http2.stream import Stream


class CallIo(Protocol):
    """What a call asks of the socket below it.

    Attributes:
        has_lent: Whether the socket may still refer to memory that was sent; the caller resets it once the peer has
            read everything.
    """

    has_lent: bool

    def check_deadline(self) -> None:
        """See `bngrad_wire.http2.sockets.patience.Patience`."""

    def expect_large_messages(self, *, are_kept: bool) -> None:
        """See `bngrad_wire.http2.sockets.buffered_socket.BufferedSocket`."""


class Carrier(ABC):
    """Carries one call at a time.

    Attributes:
        io: The socket.
        stream: The active stream; None between calls.
        outbound: Frames that `flush` will send.
        blocking: Whether sending waits until the socket has taken everything; if not, the rest stays in `outbound`.
        send_window: Bytes that the peer accepts on the connection for now.
        initial_send_window: Bytes that the peer accepts on a new stream.
        max_frame_size: The longest payload that the peer accepts in a frame.
        table_size_update: What the next header block to be sent must begin with.
        unanswered_ping: The content of the last PING of `ping`; empty once the peer has answered it.
        data_left: Unread bytes of the active stream's current DATA frame.
    """

    io: CallIo
    stream: Stream | None
    outbound: list[Buffer]
    blocking: bool
    send_window: int
    initial_send_window: int
    max_frame_size: int
    table_size_update: bytes
    unanswered_ping: bytes
    data_left: int

    @property
    def send_room(self) -> int:
        """How many bytes of DATA can be sent at once."""
        return self.send_window

    @property
    def answer_room(self) -> int:
        """How many bytes an answer may have that is not to wait in a thread: there is room, or it may be kept."""
        return self.send_room

    @property
    def expects_whole(self) -> bool:
        """Whether memory for all of the call was taken, which is received before the call begins."""
        return False

    def append_headers(self, stream_id: int, block: bytes, flags: int) -> None:
        """Adds a header block to the outbound frames."""
        if self.table_size_update:
            block, self.table_size_update = self.table_size_update + block, b""
        self.outbound += frames.header_block(stream_id, block, flags)

    @abstractmethod
    def flush(self) -> None:
        """Sends `outbound`; if not `blocking`, as much of it as the socket takes."""

    @abstractmethod
    def ping(self) -> None:
        """Sends a PING, which the peer answers once it has read all that was sent before; see `unanswered_ping`."""

    @abstractmethod
    def earn(self, nbytes: int, shift: int = ...) -> None:
        """Adds to the peer's budget for bytes that moved a call forward."""

    @abstractmethod
    def handle_frame(self) -> None:
        """Waits for what the peer sends next, and handles it; of DATA, only the beginning: see `data_left`."""

    @abstractmethod
    def handle_available_frames(self) -> None:
        """Handles what has arrived whole, without waiting."""

    @abstractmethod
    def read_data_into(self, target: memoryview) -> int:
        """Fills the start of ``target`` from the current DATA frame; returns the count, which is not zero."""

    @abstractmethod
    def buffer_data_frame(self) -> None:
        """Moves the rest of the current DATA frame to the stream's buffer, so that the next frame can be read."""

    @abstractmethod
    def acknowledge_received_data(self, nbytes: int, stream: Stream | None) -> None:
        """Counts DATA bytes as consumed, and restores the peer's window from time to time (RFC 9113, section 5.2)."""

    @abstractmethod
    def allow_large_frames(self) -> None:
        """Prepares to receive a large message."""

    @abstractmethod
    def close_stream(self, stream: Stream) -> None:
        """Closes a stream on this side; data that is unread, or arrives later, is discarded."""
