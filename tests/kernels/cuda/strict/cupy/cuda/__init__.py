"""Streams, events and memory."""

from __future__ import annotations

import threading

import numpy as np

from cupy import incidents
from cupy.cuda import driver, runtime

__all__ = ["Event", "Memory", "MemoryPool", "Stream", "alloc_pinned_memory", "driver", "runtime"]

_ALIGNMENT = 256


class Stream:
    """A stream that has done its work when a call returns, unless a kernel on it hangs."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.ptr = 0 if null else id(self)
        self.is_stuck = False

    def synchronize(self) -> None:
        if self.is_stuck:
            threading.Event().wait()

    def wait_event(self, event: Event) -> None:
        assert type(event) is Event
        assert event.was_recorded, "CUDA does not wait for an event that was not recorded"


class Event:
    """An event that waits for its stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._stream: Stream | None = None

    @property
    def was_recorded(self) -> bool:
        return self._stream is not None

    def record(self, stream: Stream | None = None) -> None:
        assert stream is not None
        self._stream = stream

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class Memory:
    """A block of the GPU's memory, free again with the object."""

    def __init__(self, size: int) -> None:
        runtime.require_ints(size)
        self.size = 0
        runtime.take_memory(size)
        self.size = size
        self._memory = np.full(size + _ALIGNMENT, 0xFF, np.uint8)  # memory that was not written is NaN
        self.ptr: int = self._memory.ctypes.data + -self._memory.ctypes.data % _ALIGNMENT

    def __del__(self) -> None:
        if self.size:
            runtime.give_memory(self.size)


class MemoryPointer:
    """A block of a pool, which has it back with the object."""

    def __init__(self, pool: MemoryPool, memory: Memory) -> None:
        self.ptr = memory.ptr
        self._pool, self._memory = pool, memory

    def __del__(self) -> None:
        self._pool._free.append(self._memory)


class MemoryPool:
    """Memory that is taken again without a call of CUDA; a pool counts what is free in it up to its limit, too."""

    def __init__(self) -> None:
        self._limit = self._total = 0
        self._free: list[Memory] = []

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        runtime.require_ints(size)
        assert fraction is None
        self._limit = size or 0

    def total_bytes(self) -> int:
        return self._total

    def malloc(self, size: int) -> MemoryPointer:
        runtime.require_ints(size)
        fitting = [memory for memory in self._free if memory.size == size]
        if fitting:
            self._free.remove(fitting[0])
        elif self._limit and self._total + size > self._limit:
            raise MemoryError(f"out of memory allocating {size} bytes")
        else:
            fitting = [Memory(size)]
            self._total += size
        incidents.tell(f"took {size} bytes from a pool")
        return MemoryPointer(self, fitting[0])

    def free_all_blocks(self) -> None:
        while self._free:
            self._total -= self._free.pop().size


def alloc_pinned_memory(size: int) -> memoryview:
    """Page-locked memory of the host."""
    runtime.require_ints(size)
    if size > runtime.most_pinned_nbytes():
        raise runtime.CUDARuntimeError(runtime.OUT_OF_MEMORY)
    return memoryview(bytearray(size))
