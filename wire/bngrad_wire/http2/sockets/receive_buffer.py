"""Where a socket's received bytes lie until they are consumed."""

from __future__ import annotations

from contextlib import suppress

BUFFER_NBYTES = 64 * 1024
LARGE_BUFFER_NBYTES = 1792 * 1024
_spare_buffers: list[bytearray | None] = [None] * 16
"""The large buffers that no socket has, which bounds their number; those that were never used have no memory yet."""


class ReceiveBuffer:
    """A buffer of its own, or for a while one of a few large ones.

    Attributes:
        buffer: Received bytes; those between ``low`` and ``high`` are not consumed yet.
        is_large: Whether it is a large buffer; see `enlarge`.
    """

    def __init__(self) -> None:
        self.buffer = self._own_buffer = bytearray(BUFFER_NBYTES)
        self._view = memoryview(self.buffer)
        self.is_large = False
        self.low = self.high = 0

    def enlarge(self) -> None:
        """Exchanges the buffer for a large one, if one is free and there is memory for it, until `shrink`."""
        if not self.is_large and _spare_buffers:
            with suppress(IndexError):  # another thread took it
                spare = _spare_buffers.pop()
                try:
                    self._exchange(spare or bytearray(LARGE_BUFFER_NBYTES))
                except MemoryError:
                    _spare_buffers.append(spare)

    def shrink(self) -> None:
        """Gives the large buffer back, unless there is something in it."""
        if self.is_large and self.low == self.high:
            buffer = self.buffer
            self._exchange(self._own_buffer)
            _spare_buffers.append(buffer)

    def _exchange(self, buffer: bytearray) -> None:
        rest = self.high - self.low
        view = memoryview(buffer)
        view[:rest] = self._view[self.low : self.high]
        self.buffer, self._view = buffer, view
        self.low, self.high = 0, rest
        self.is_large = buffer is not self._own_buffer

    def _make_room(self) -> None:
        """Moves what is not consumed to the beginning."""
        if self.low == self.high:
            self.low = self.high = 0
        elif self.low:
            rest = self.high - self.low
            self._view[:rest] = self._view[self.low : self.high]
            self.low, self.high = 0, rest
