"""The memory that a worker maps: the arena, and the regions that are shared with clients."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from bngrad_kernels.backend import Backend
from bngrad_server.memory.layout import ARENA

logger = logging.getLogger(__name__)


class PinnedMemory:
    """Mapped memory by its numbers; a GPU's worker page-locks what it may of it.

    The slots of a worker share it: each adds what the front process tells it of, and removes it when its problems no
    longer name it. Memory stays mapped while a slot uses it. Each piece is page-locked whole or not at all: CUDA
    refuses a copy of which only a part is in memory that it has locked.

    Attributes:
        mapped: The memory.
    """

    def __init__(self, arena: memoryview, backend: Backend, pinned_nbytes: int) -> None:
        """Begins with the arena; the backend page-locks at most ``pinned_nbytes``."""
        self.mapped: dict[int, memoryview] = {}
        self._backend = backend
        self._left_nbytes = pinned_nbytes if backend.memory_nbytes else 0
        self._registered: set[int] = set()
        self._users: Counter[int] = Counter()
        """How many slots, and copies ahead, use each piece of memory."""
        self._mutex = threading.Lock()
        self.add(ARENA, arena)

    def add(self, number: int, memory: memoryview) -> None:
        """Adds memory for one more slot."""
        with self._mutex:
            self._users[number] += 1
            if self._users[number] == 1:
                self.mapped[number] = memory
                self._register(number, memory)

    def remove(self, number: int) -> None:
        """Removes memory for one slot, none of whose problems names it."""
        with self._mutex:
            self._users[number] -= 1
            if self._users[number]:
                return
            del self._users[number]
            memory = self.mapped.pop(number)
            if number in self._registered:
                self._registered.remove(number)
                self._left_nbytes += len(memory)
                self._backend.unregister(np.frombuffer(memory, np.uint8))

    @contextmanager
    def using(self, number: int) -> Iterator[memoryview | None]:
        """Keeps memory that a slot has added until the block ends; None if none has it, or has it any longer."""
        with self._mutex:
            memory = self.mapped.get(number)
            if memory is not None:
                self._users[number] += 1
        try:
            yield memory
        finally:
            if memory is not None:
                self.remove(number)

    def _register(self, number: int, memory: memoryview) -> None:
        """Page-locks memory, or logs why it cannot be."""
        if not self._backend.memory_nbytes:
            return
        name = "the arena" if number == ARENA else f"region {number}"
        if len(memory) > self._left_nbytes:
            left = f"{self._left_nbytes} bytes are left of pinned_bytes"
            logger.warning("%s, %d bytes, is not page-locked, so its copies are slower: %s", name, len(memory), left)
            return
        began = time.monotonic()
        try:
            self._backend.register(np.frombuffer(memory, np.uint8))
        except Exception as error:
            logger.warning("%s, %d bytes, is not page-locked, so its copies are slower: %s", name, len(memory), error)
        else:
            self._registered.add(number)
            self._left_nbytes -= len(memory)
            taken_s = time.monotonic() - began
            logger.info("page-locking %s, %d bytes, took %.1f s", name, len(memory), taken_s)
