"""Shared memory for the tensors of all requests in flight, pooled and reused.

Fresh pages cost several times more than the copy into them, so blocks are handed out lowest address first: memory that
was touched once is used for the next request.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass

from bngrad_server.errors import ArenaTooSmallError
from bngrad_server.memory.layout import ALIGNMENT, aligned
from bngrad_server.memory.mapping import map_file

_CHECK_INTERVAL_S = 0.2
"""How often a thread that waits for memory checks whether its client is still there."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the arena, in bytes."""

    offset: int
    nbytes: int


class Arena:
    """One anonymous shared-memory file, mapped here and by every worker; it is freed with the last process.

    Attributes:
        fd: The file descriptor to pass to a worker.
        nbytes: Its size.
        view: The mapped memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _round_up(nbytes)
        self.fd = os.memfd_create("bngrad-arena")
        os.ftruncate(self.fd, self.nbytes)
        self.view = memoryview(map_file(self.fd, self.nbytes))
        self._free = [Block(0, self.nbytes)]  # by offset, no two adjacent
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    def allocate(
        self, nbytes: int, deadline: float | None = None, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Block:
        """Takes a block, waiting for memory where none is free; first come, first served.

        Args:
            nbytes: Its size.
            deadline: When to give up, on the monotonic clock; None means never.
            is_cancelled: Tells whether to give up at once.

        Raises:
            ArenaTooSmallError: The arena could never hold it.
            TimeoutError: No memory became free in time.
            CancelledError: ``is_cancelled`` returned True.
        """
        nbytes = self._checked(nbytes)
        with self._changed:
            if not self._waiting and (block := self._take(nbytes)) is not None:
                return block
            ticket = object()
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or (block := self._take(nbytes)) is None:
                    rest_s = _CHECK_INTERVAL_S
                    if deadline is not None:
                        rest_s = min(rest_s, deadline - time.monotonic())
                    if rest_s <= 0:
                        raise TimeoutError(f"no {nbytes} bytes of staging memory became free in time")
                    if is_cancelled():
                        raise CancelledError
                    self._changed.wait(rest_s)
                return block
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def allocate_at_once(self, nbytes: int) -> Block | None:
        """Takes a block without waiting; returns None if none is free, or if others wait for one.

        Raises:
            ArenaTooSmallError: The arena could never hold it.
        """
        nbytes = self._checked(nbytes)
        with self._changed:
            return None if self._waiting else self._take(nbytes)

    def free(self, block: Block) -> None:
        """Returns a block to the arena; to be called once for each block."""
        with self._changed:
            self._free.append(block)
            self._free.sort(key=lambda free: free.offset)
            self._free = _merged(self._free)
            self._changed.notify_all()

    @property
    def free_bytes(self) -> int:
        """How many bytes are not in use."""
        with self._changed:
            return sum(block.nbytes for block in self._free)

    def close(self) -> None:
        """Closes the file; the memory is freed once no process maps it."""
        os.close(self.fd)

    def _checked(self, nbytes: int) -> int:
        nbytes = _round_up(nbytes)
        if nbytes > self.nbytes:
            raise ArenaTooSmallError(
                f"the request needs {nbytes} bytes of staging memory, and the server has {self.nbytes}"
            )
        return nbytes

    def _take(self, nbytes: int) -> Block | None:
        for i, block in enumerate(self._free):
            if block.nbytes >= nbytes:
                rest = Block(block.offset + nbytes, block.nbytes - nbytes)
                self._free[i : i + 1] = [rest] if rest.nbytes else []
                return Block(block.offset, nbytes)
        return None


def _merged(blocks: list[Block]) -> list[Block]:
    merged = blocks[:1]
    for block in blocks[1:]:
        last = merged[-1]
        if last.offset + last.nbytes == block.offset:
            merged[-1] = Block(last.offset, last.nbytes + block.nbytes)
        else:
            merged.append(block)
    return merged


def _round_up(nbytes: int) -> int:
    """The next multiple of ALIGNMENT, but not 0, so that every block has its own address."""
    return max(ALIGNMENT, aligned(nbytes))
