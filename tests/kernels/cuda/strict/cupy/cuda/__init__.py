"""Streams, events and memory."""

from __future__ import annotations

import threading

import numpy as np

from cupy.cuda import driver, runtime

__all__ = ["Event", "Memory", "Stream", "alloc_pinned_memory", "driver", "runtime"]

_ALIGNMENT = 256


class Stream:
    """A stream that has done its work when a call returns, unless a kernel on it hangs."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.ptr = 0 if null else id(self)
        self.is_stuck = False

    def synchronize(self) -> None:
        if self.is_stuck:
            threading.Event().wait()


class Event:
    """An event that waits for its stream."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self._stream: Stream | None = None

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


def alloc_pinned_memory(size: int) -> memoryview:
    """Page-locked memory of the host."""
    runtime.require_ints(size)
    if size > runtime.most_pinned_nbytes():
        raise runtime.CUDARuntimeError(runtime.OUT_OF_MEMORY)
    return memoryview(bytearray(size))
