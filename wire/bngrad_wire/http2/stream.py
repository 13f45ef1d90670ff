"""The state of a call that the frames of its connection change."""

from __future__ import annotations

from abc import ABC, abstractmethod

from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import RpcError


class Stream(ABC):
    """What the connection knows of a call.

    Attributes:
        id: The stream's number.
        send_window: Bytes that the peer takes on this stream for now; negative after its SETTINGS shrank it.
        receive_window: Bytes that the peer may send on this stream for now.
        unreturned: Bytes that were used up and for which the peer has not got its window back.
        early: What arrived while this end was not reading.
        ended: The peer has ended or reset the stream; there may still be data to read.
        reset: The peer has reset the stream.
        failure: Why the call came to nothing.
    """

    def __init__(self, stream_id: int, send_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = frames.MAX_WINDOW
        self.unacknowledged = 0
        self.receive_buffer = bytearray()
        self.ended = False
        self.reset = False
        self.failure: RpcError | None = None

    @abstractmethod
    def headers_received(self, headers: dict[str, str], end: bool) -> None:
        """Takes a header block of this stream."""
