"""What a connection is to send for its lanes: their frames, of which those with DATA are cut to fit its windows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames

_MOST_KEPT_NBYTES = 2**22
"""How much a connection may keep of answers for which its client has no room yet."""


class _Frame:
    """A frame or, once some of it was sent, a frame with the rest of its DATA; a header block counts as one.

    Attributes:
        pieces: All of it.
        nbytes: The size of the pieces.
        data_nbytes: How much DATA it has; None if it is no frame with DATA.
        flags: Its flags.
    """

    __slots__ = ("data_nbytes", "flags", "nbytes", "pieces")

    def __init__(self, pieces: list[Buffer], nbytes: int, data_nbytes: int | None, flags: int) -> None:
        self.pieces = pieces
        self.nbytes = nbytes
        self.data_nbytes = data_nbytes
        self.flags = flags

    @property
    def ends_stream(self) -> bool:
        """Whether it has the trailers, which end the stream on this side."""
        return self.data_nbytes is None and bool(self.flags & frames.END_STREAM)

    def cut(self, nbytes: int, stream_id: int, max_frame_size: int) -> list[Buffer]:
        """Removes so much of its DATA, which is not all, and returns frames with that."""
        assert self.data_nbytes is not None
        self.data_nbytes -= nbytes
        self.nbytes -= nbytes
        first, *rest = self.pieces
        views = deque([memoryview(first)[frames.HEADER_NBYTES :], *(memoryview(piece) for piece in rest)])
        taken: list[Buffer] = []
        while nbytes:
            left = min(nbytes, max_frame_size)
            nbytes -= left
            taken.append(frames.frame_header(left, frames.DATA, 0, stream_id))
            while left:
                piece = views.popleft()
                if len(piece) > left:
                    views.appendleft(piece[left:])
                    piece = piece[:left]
                left -= len(piece)
                taken.append(piece)
        self.pieces = [frames.frame_header(self.data_nbytes, frames.DATA, self.flags, stream_id), *views]
        return taken


def _split(pieces: Sequence[Buffer]) -> deque[_Frame]:
    """Splits what is to be sent into frames, of which each begins a piece."""
    found: deque[_Frame] = deque()
    frame: list[Buffer] = []
    left = length = kind = flags = 0
    for piece in filter(len, pieces):
        if not left:
            length, kind, flags, _ = frames.parse_header(piece, 0)
            left = frames.HEADER_NBYTES + length
            frame = []
        frame.append(piece)
        left -= len(piece)
        if left:
            continue
        nbytes = frames.HEADER_NBYTES + length
        if kind == frames.CONTINUATION:  # nothing may come in between
            found[-1].pieces += frame
            found[-1].nbytes += nbytes
        else:
            found.append(_Frame(frame, nbytes, length if kind == frames.DATA else None, flags))
    return found


class Batch:
    """Frames of one call that are sent together.

    Attributes:
        frames: Those that are not sent yet.
        stream_id: The number of their stream.
        nbytes: How much they have.
        data_nbytes: How much DATA they have.
        taken: Set once no piece is needed any longer; None if nothing waits for that, as all pieces may be kept.
        on_taken: Called with the number of bytes whenever some were sent, and whether these were the last.
    """

    def __init__(
        self, pieces: Sequence[Buffer], on_taken: Callable[[int, bool], None], taken: threading.Event | None = None
    ) -> None:
        self.frames = _split(pieces)
        self.stream_id = frames.parse_header(pieces[0], 0)[3]
        self.nbytes = sum(frame.nbytes for frame in self.frames)
        self.data_nbytes = sum(frame.data_nbytes or 0 for frame in self.frames)
        self.on_taken = on_taken
        self.taken = taken

    def drop(self) -> None:
        """Tells what waits that no piece is needed any longer, as the frames are not sent."""
        self.frames.clear()
        if self.taken is not None:
            self.taken.set()


class Part(NamedTuple):
    """A frame as it is sent, or several with DATA of one.

    Attributes:
        batch: What it belongs to.
        pieces: All of it.
        data_nbytes: How much DATA it has.
        ends_stream: Whether it ends the stream on this side.
        is_last: Whether it is the last one of its batch.
    """

    batch: Batch
    pieces: list[Buffer]
    data_nbytes: int
    ends_stream: bool
    is_last: bool

    def was_sent(self) -> None:
        """Tells the lane so; the pieces are no longer needed."""
        if self.is_last and self.batch.taken is not None:
            self.batch.taken.set()
        self.batch.on_taken(sum(map(len, self.pieces)), self.is_last)


class KeptAnswers:
    """Bounds what all connections together keep for clients that have no room for it now.

    Attributes:
        free_nbytes: How much more answers they may keep; other frames, such as trailers, are kept in any case.
    """

    def __init__(self, free_nbytes: int) -> None:
        self.free_nbytes = free_nbytes


class OutboundQueue:
    """What was not sent yet; the streams take turns. One that waits for a window has none until `window_opened`.

    Attributes:
        data_nbytes: How much DATA there is.
        kept_nbytes: How much there is for which nothing waits.
        emptied: The streams that have had something to send, and no longer have.
    """

    def __init__(self, answers: KeptAnswers) -> None:
        self.data_nbytes = self.kept_nbytes = 0
        self.emptied: list[int] = []
        self._answers = answers
        self._batches: dict[int, deque[Batch]] = {}
        self._turns: dict[int, None] = {}  # the stream whose turn is next comes first

    def __len__(self) -> int:
        """How many streams have something to send."""
        return len(self._batches)

    @property
    def room_to_keep(self) -> int:
        """How much more may be kept."""
        return min(_MOST_KEPT_NBYTES - self.kept_nbytes, self._answers.free_nbytes)

    def data_nbytes_of(self, stream_id: int) -> int:
        """How much DATA there is of a stream."""
        batches = self._batches.get(stream_id)
        return 0 if batches is None else sum([batch.data_nbytes for batch in batches])

    def add(self, batch: Batch) -> None:
        """Adds frames of a stream after those that it has."""
        if batch.stream_id not in self._batches:
            self._batches[batch.stream_id] = deque()
            self._turns[batch.stream_id] = None
        self._batches[batch.stream_id].append(batch)
        self._count(batch, batch.nbytes, batch.data_nbytes)

    def withdraw(self, stream_id: int) -> None:
        """Drops what there is of a stream: its pieces are then no longer needed."""
        for batch in self._batches.get(stream_id, ()):
            self._count(batch, -batch.nbytes, -batch.data_nbytes)
            batch.drop()
        self._forget(stream_id)

    def clear(self) -> None:
        """Forgets everything."""
        self._keep(-self.kept_nbytes)
        self._batches.clear()
        self._turns.clear()

    def next_turn(self) -> int | None:
        """Returns the stream whose turn it is, and which has the next one after all others; None if all wait."""
        stream_id = next(iter(self._turns), None)
        if stream_id is not None:
            self._turns[stream_id] = self._turns.pop(stream_id)
        return stream_id

    def window_opened(self, stream_id: int) -> None:
        """Gives a stream turns again, as it may send more; all streams for 0, which stands for the connection."""
        for waiting in [stream_id] if stream_id else self._batches:
            if waiting in self._batches:
                self._turns.setdefault(waiting)

    def take(self, stream_id: int, room: int, max_frame_size: int) -> Part | None:
        """Removes and returns what comes next of a stream, with at most so much DATA; None if it waits now.

        That is a frame, or as much of its DATA as there is room for, in frames that are not too large.
        """
        batches = self._batches[stream_id]
        batch = batches[0]
        frame = batch.frames[0]
        data_nbytes = frame.data_nbytes or 0
        if data_nbytes and data_nbytes > min(room, max_frame_size):
            if room <= 0:
                self._turns.pop(stream_id, None)
                return None
            nbytes = min(room, data_nbytes - 1)
            if nbytes > max_frame_size:
                nbytes -= nbytes % max_frame_size
            self._remove(batch, nbytes, nbytes)
            return Part(batch, frame.cut(nbytes, stream_id, max_frame_size), nbytes, ends_stream=False, is_last=False)
        self._remove(batch, frame.nbytes, data_nbytes)
        batch.frames.popleft()
        if not batch.frames:
            batches.popleft()
            if not batches:
                self._forget(stream_id)
        return Part(batch, frame.pieces, data_nbytes, frame.ends_stream, is_last=not batch.frames)

    def _forget(self, stream_id: int) -> None:
        self._turns.pop(stream_id, None)
        if self._batches.pop(stream_id, None) is not None:
            self.emptied.append(stream_id)

    def _remove(self, batch: Batch, nbytes: int, data_nbytes: int) -> None:
        batch.nbytes -= nbytes
        batch.data_nbytes -= data_nbytes
        self._count(batch, -nbytes, -data_nbytes)

    def _count(self, batch: Batch, nbytes: int, data_nbytes: int) -> None:
        self.data_nbytes += data_nbytes
        if batch.taken is None:
            self._keep(nbytes)

    def _keep(self, nbytes: int) -> None:
        self.kept_nbytes += nbytes
        self._answers.free_nbytes -= nbytes
