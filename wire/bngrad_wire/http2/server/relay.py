"""What a connection with several calls knows of each."""

from __future__ import annotations

from bngrad_wire.http2.server.lane import Lane
from bngrad_wire.http2.stream import Stream


class Uploads:
    """Bounds how many calls of all connections have not arrived whole: each may send a window that nothing reads yet.

    Attributes:
        count: How many there are.
        most: Beyond this, a connection that has a call may not begin another one.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self.most = most


class Relay(Stream):
    """What the connection knows of a call that a lane carries.

    Attributes:
        lane: The lane.
        is_answered: Whether the end of the answer was sent.
        is_upload: Whether it is one of `Uploads`.
    """

    def __init__(self, call: Stream, lane: Lane, receive_window: int, failed: dict[int, None]) -> None:
        super().__init__(call.id, call.send_window)
        self.lane = lane
        self.is_answered = self.is_upload = False
        self.receive_window = receive_window
        self._failed = failed

    def progressed(self) -> None:
        """Tells the lane that the client has reset the call, or ended it by trailers."""
        if self.failure is not None:
            self._failed[self.id] = None
            self.lane.fail(self.failure)
        else:
            self.lane.deliver(b"", end=True)


def is_open(stream: Stream) -> bool:
    """Whether a stream counts for the client, as an end has not ended it."""
    return not (isinstance(stream, Relay) and stream.is_answered and stream.peer_ended)
