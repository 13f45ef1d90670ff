"""What a connection with several calls knows of each."""

from __future__ import annotations

from bngrad_wire.http2.server.lane import Lane
from bngrad_wire.http2.stream import Stream


class Uploads:
    """Bounds how many calls of all connections have not arrived whole: each may send a window that nothing reads yet.

    Attributes:
        count: How many there are.
        most: Beyond this, a connection that has a call may not begin another one.
        free_nbytes: How much more memory may be taken for large ones, to receive them whole.
    """

    def __init__(self, most: int, free_nbytes: int) -> None:
        self.count = 0
        self.most = most
        self.free_nbytes = free_nbytes

    def leave(self, relay: Relay) -> None:
        """Counts a call no longer."""
        self.count -= relay.is_upload
        self.free_nbytes += relay.taken_nbytes
        relay.is_upload, relay.taken_nbytes = False, 0


class Relay(Stream):
    """What the connection knows of a call that a lane carries.

    Attributes:
        lane: The lane.
        is_answered: Whether the end of the answer was sent.
        is_upload: Whether it is one of `Uploads`.
        taken_nbytes: How much memory was taken to receive it whole.
        has_begun: Whether some DATA has arrived.
    """

    def __init__(self, call: Stream, lane: Lane, windows: tuple[int, int], failed: dict[int, None]) -> None:
        """Relays a call; ``windows`` are for what is sent and what is received."""
        super().__init__(call.id, windows[0])
        self.lane = lane
        self.is_answered = self.is_upload = self.has_begun = False
        self.taken_nbytes = 0
        self.receive_window = windows[1]
        self._failed = failed

    @property
    def may_run(self) -> bool:
        """Whether its next DATA frames may be handled together."""
        return self.has_begun and not (self.ended or self.reset) and self.content_left is None

    def progressed(self) -> None:
        """Tells the lane that the client has reset the call, or ended it by trailers."""
        if self.failure is not None:
            self._failed[self.id] = None
            self.lane.fail(self.failure)
        else:
            self.lane.deliver(b"", end=True)


def is_open(stream: Stream) -> bool:
    """Whether a stream counts for the client, as an end has not ended it."""
    return not (isinstance(stream, Relay) and (stream.reset or (stream.is_answered and stream.peer_ended)))
