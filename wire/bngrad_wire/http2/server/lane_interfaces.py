"""What a lane needs around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bngrad_wire.http2.server.outbound import Batch
from bngrad_wire.http2.sockets.patience import Patience


class Loop(Protocol):
    """The event loop of the connection."""

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the event loop's."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Runs a callback in its thread; any thread may call this."""


class Lanes(Protocol):
    """What a lane asks of its connection; for the event loop's thread."""

    @property
    def room_to_keep(self) -> int:
        """How many bytes may be kept until there is room to send them."""

    def send_room_of(self, stream_id: int) -> int:
        """How many bytes of DATA can be sent at once on a stream."""

    def has_news(self, stream_id: int) -> None:
        """Takes note that the owner of a lane has something to handle."""

    def send_batch(self, batch: Batch) -> None:
        """Sends frames after those before them, as soon as the peer takes them."""

    def withdraw(self, stream_id: int) -> None:
        """Sends no more frames of a stream."""

    def consume(self, stream_id: int, nbytes: int, *, is_large: bool) -> None:
        """Takes note that DATA was read of a stream, which carries a large message or does not."""


class LaneIo(Patience):
    """The limits of a lane's waits. Nothing is lent to its socket: whatever is sent has been copied."""

    has_lent = False

    def expect_large_messages(self, *, are_kept: bool) -> None:
        """Does nothing: the socket is shared by calls of all sizes."""


class Target:
    """Memory that the thread of an event loop fills, and another one waits for.

    Attributes:
        rest: What is not filled yet; empty once nothing more will be, as other DATA or the end of the call came before.
        filled: How many bytes are.
    """

    __slots__ = ("filled", "rest")

    def __init__(self, memory: memoryview) -> None:
        self.rest = memory
        self.filled = 0

    def advance(self, nbytes: int) -> None:
        """Takes note that the next bytes are filled."""
        self.filled += nbytes
        self.rest = self.rest[nbytes:]

    def close(self) -> None:
        """Fills nothing more."""
        self.rest = memoryview(b"")
