"""The frames that a connection is to send for its lanes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames

LARGEST_FRAME_NBYTES = 2**14
"""Frames are no longer: one fits what is left of a connection's window, also before a peer restores that."""
_SENT_NBYTES = 2**18
"""About how much is sent with one system call."""


class OutboundFrame(NamedTuple):
    """A frame of a lane.

    Attributes:
        stream_id: The number of its stream.
        pieces: The frame.
        nbytes: Its size.
        data_nbytes: How much it takes of the peer's windows.
        is_end: Whether it ends the stream on this side.
        is_last: Whether it is the last one of its batch.
        batch: What it is sent with.
    """

    stream_id: int
    pieces: list[Buffer]
    nbytes: int
    data_nbytes: int
    is_end: bool
    is_last: bool
    batch: Batch


class Batch:
    """Frames of one call that are sent together.

    Attributes:
        frames: The frames, until they are sent or dropped: each refers to the batch.
        stream_id: The number of their stream.
        taken: Set once no piece is needed any longer; None if nothing waits for that, as all pieces may be kept.
        on_taken: Called with the size of each frame once its pieces are no longer needed, and whether it was the last.
    """

    def __init__(
        self, pieces: Sequence[Buffer], on_taken: Callable[[int, bool], None], taken: threading.Event | None = None
    ) -> None:
        self.frames = list(self._frames(pieces))
        self.stream_id = self.frames[0].stream_id
        self.on_taken = on_taken
        self.taken = taken

    def drop(self) -> None:
        """Tells what waits that no piece is needed any longer, as the frames are not sent."""
        self.frames = []
        if self.taken is not None:
            self.taken.set()

    def _frames(self, pieces: Sequence[Buffer]) -> Iterator[OutboundFrame]:
        """Cuts pieces into frames, of which each begins a piece."""
        frame: list[Buffer] = []
        last = len(pieces) - 1
        left = nbytes = data_nbytes = stream_id = 0
        is_end = False
        for i, piece in enumerate(pieces):
            if not frame:
                length, kind, flags, stream_id = frames.parse_header(piece, 0)
                is_end = kind == frames.HEADERS and bool(flags & frames.END_STREAM)
                left = nbytes = frames.HEADER_NBYTES + length
                data_nbytes = length if kind == frames.DATA else 0
            frame.append(piece)
            left -= len(piece)
            if not left:
                yield OutboundFrame(stream_id, frame, nbytes, data_nbytes, is_end, i == last, self)
                frame = []


class OutboundQueue:
    """The frames that were not sent yet, in the order in which the lanes gave them.

    Attributes:
        kept_nbytes: The size of those for which nothing waits.
        data_nbytes: How much all of them take of the peer's windows.
    """

    def __init__(self) -> None:
        self.kept_nbytes = self.data_nbytes = 0
        self._frames: deque[OutboundFrame] = deque()
        self._sending: list[OutboundFrame] = []

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, batch: Batch) -> None:
        """Adds frames."""
        added, batch.frames = batch.frames, []
        self._frames += added
        self._count(added, 1)

    def withdraw(self, stream_id: int) -> None:
        """Drops the frames of a stream, whose pieces are then no longer needed."""
        withdrawn = [frame for frame in self._frames if frame.stream_id == stream_id]
        if withdrawn:
            self._frames = deque(frame for frame in self._frames if frame.stream_id != stream_id)
            self._count(withdrawn, -1)
            for frame in withdrawn:
                frame.batch.drop()

    def clear(self) -> None:
        """Drops all frames."""
        self._frames.clear()
        self._sending.clear()

    def next(self, window: int) -> list[OutboundFrame]:
        """Removes and returns the frames to be sent next, as the peer's window allows; see `sent`."""
        nbytes = 0
        while self._frames and nbytes < _SENT_NBYTES and self._frames[0].data_nbytes <= window:
            frame = self._frames.popleft()
            window -= frame.data_nbytes
            nbytes += frame.nbytes
            self._sending.append(frame)
        self._count(self._sending, -1)
        return self._sending

    def sent(self) -> None:
        """Tells the owners of the frames that `next` has returned that their pieces are no longer needed."""
        sent, self._sending = self._sending, []
        for frame in sent:
            batch = frame.batch
            if frame.is_last and batch.taken is not None:
                batch.taken.set()
            batch.on_taken(frame.nbytes, frame.is_last)

    def _count(self, counted: Sequence[OutboundFrame], sign: int) -> None:
        for frame in counted:
            self.data_nbytes += sign * frame.data_nbytes
            if frame.batch.taken is None:
                self.kept_nbytes += sign * frame.nbytes
