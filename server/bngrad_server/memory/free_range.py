"""What of a range of memory is free."""

from __future__ import annotations

import bisect


class FreeRange:
    """A range of memory, and what of it is free: the lowest first, since memory that was touched once is faster.

    Attributes:
        free_nbytes: The size of what is free.
    """

    def __init__(self, offset: int, nbytes: int) -> None:
        self.free_nbytes = nbytes
        self._starts = [offset] if nbytes else []  # of the free pieces, no two adjacent
        self._ends = [offset + nbytes] if nbytes else []

    def take(self, nbytes: int) -> int | None:
        """Takes memory, and returns its offset; None if there is no such piece."""
        if nbytes > self.free_nbytes:
            return None
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= nbytes:
                if end - start > nbytes:
                    self._starts[i] += nbytes
                else:
                    del self._starts[i], self._ends[i]
                self.free_nbytes -= nbytes
                return start
        return None

    def take_above(self, offset: int, nbytes: int) -> int | None:
        """Takes memory from an offset on, if there is such a piece, else any."""
        for i, (piece, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            start = max(piece, offset)
            if end - start >= nbytes:
                rest = [(piece, start), (start + nbytes, end)]
                self._starts[i : i + 1] = [first for first, last in rest if first < last]
                self._ends[i : i + 1] = [last for first, last in rest if first < last]
                self.free_nbytes -= nbytes
                return start
        return self.take(nbytes)

    def put_back(self, start: int, nbytes: int) -> None:
        """Frees memory that was taken."""
        end = start + nbytes
        i = bisect.bisect(self._starts, start)
        follows, precedes = i > 0 and self._ends[i - 1] == start, self._starts[i : i + 1] == [end]
        if follows and precedes:
            self._ends[i - 1] = self._ends.pop(i)
            del self._starts[i]
        elif follows:
            self._ends[i - 1] = end
        elif precedes:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
        self.free_nbytes += nbytes
