"""A stream of HTTP/2, which a call is."""

from __future__ import annotations

from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import RpcError


class Stream:
    """A stream; calls are its subclasses.

    Attributes:
        id: The stream's number.
        send_window: Bytes that the peer accepts on this stream for now; negative after its SETTINGS shrank it.
        receive_window: Bytes that the peer may send on this stream for now.
        unacknowledged: Bytes that were consumed, and not yet added to the peer's window again.
        content_left: Bytes of the request that are still to come, where its content-length tells.
        receive_buffer: DATA that arrived before it was read; a view if all arrived at once.
        ended: No more DATA is to be received, as the peer has ended the stream; there may still be some to read.
        peer_ended: The peer has ended or reset the stream, so that it may send no more.
        reset: Either end has reset the stream.
        failure: Why the call failed; None while it has not.
    """

    def __init__(self, stream_id: int, send_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = frames.MAX_WINDOW
        self.unacknowledged = 0
        self.content_left: int | None = None
        self.receive_buffer: bytearray | memoryview = bytearray()
        self.ended = False
        self.peer_ended = False
        self.reset = False
        self.failure: RpcError | None = None

    def progressed(self) -> None:
        """Is called after a window was opened, and when the peer has ended or reset a stream that takes no DATA.

        Most streams do nothing: the thread that waits for one looks at it.
        """
