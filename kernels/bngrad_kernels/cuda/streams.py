"""A GPU and its streams, as interfaces that `device` and the tests' emulator implement, and the pool of streams."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol

from bngrad_kernels.cuda.chunks.copy_plan import Copy
from bngrad_kernels.cuda.chunks.layout import Launch
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.problem import Array

_LEAST_NBYTES = 1 << 20


class CudaStream(Protocol):
    """A CUDA stream with its own block of device memory. Calls return at once; the work is done later, in order."""

    @property
    def address(self) -> int:
        """The start of its device memory, a multiple of 256."""

    @property
    def nbytes(self) -> int:
        """The size of its device memory."""

    def reserve(self, nbytes: int) -> None:
        """Grows its device memory to at least ``nbytes``; the address may change.

        Raises:
            MemoryError: The device does not have that much left.
        """

    def release(self) -> None:
        """Gives its device memory back."""

    def staging(self, nbytes: int) -> Array:
        """Returns host memory of that size to copy from and to.

        Raises:
            MemoryError: The host does not have that much page-locked memory left.
        """

    def copy_in(self, copy: Copy) -> None:
        """Copies to the device, from where the bytes are on it already, if they are."""

    def copy_out(self, copy: Copy) -> None:
        """Copies from the device."""

    def launch(self, launch: Launch, descriptors: int) -> None:
        """Launches a kernel. ``descriptors`` is the offset of the descriptors in the device memory, in bytes."""

    def wait(self) -> None:
        """Waits until all its work is done."""


class AheadCopy(Protocol):
    """A copy of host memory in `AheadMemory`."""

    def wait(self) -> None:
        """Waits until it is done; for the thread that began it."""


class AheadMemory(Protocol):
    """Device memory for copies of inputs that no problem needs yet. Thread-safe."""

    @property
    def nbytes(self) -> int:
        """How much it has taken of the device."""

    def copy(self, memory: Array) -> AheadCopy:
        """Begins to copy host memory, and returns the copy; its memory is free again once nothing refers to it.

        Raises:
            MemoryError: There is no room for it.
        """

    def drop(self) -> None:
        """Gives the memory of all copies back, once no stream reads it; their bytes come from the host then."""


class CudaDevice(Protocol):
    """A GPU, or a stand-in for one."""

    description: str
    errors: tuple[type[Exception], ...]
    """The exceptions after which this process can no longer use the device."""
    traits: Traits
    """The properties that the choice of kernels depends on."""
    memory_nbytes: int

    def warm_up(self) -> None:
        """Compiles or loads the kernels."""

    def free_nbytes(self) -> int:
        """How much of its memory no process has taken."""

    def stream(self) -> CudaStream:
        """Creates a stream."""

    def ahead_memory(self, most_nbytes: int) -> AheadMemory:
        """Creates memory for copies ahead, which takes at most ``most_nbytes`` of the device."""

    def register(self, memory: Array) -> None:
        """Page-locks host memory, so that copies from and to it are fast and overlap."""

    def unregister(self, memory: Array) -> None:
        """Undoes `register`."""


class StreamPool:
    """Streams to take and put back. Thread-safe."""

    def __init__(self) -> None:
        self._streams: list[CudaStream] = []
        self._free: queue.SimpleQueue[CudaStream] = queue.SimpleQueue()

    @property
    def used_nbytes(self) -> int:
        """How much device memory the streams hold."""
        return sum(stream.nbytes for stream in tuple(self._streams))

    @property
    def free(self) -> int:
        """How many streams are not taken."""
        return self._free.qsize()

    def open(self, create: Callable[[], CudaStream], count: int, nbytes: int) -> int:
        """Creates streams and returns how much memory each reserved: ``nbytes``, or less if the device is short of it.

        Raises:
            MemoryError: The device does not even have a megabyte for each.
        """
        while len(self._streams) < count:
            self._streams.append(create())
        while True:
            try:
                for stream in self._streams:
                    stream.reserve(nbytes)
                break
            except MemoryError:
                for stream in self._streams:
                    stream.release()
                if nbytes <= _LEAST_NBYTES:
                    raise
                nbytes //= 2
        for stream in self._streams:
            self._free.put(stream)
        return nbytes

    def take(self) -> CudaStream:
        """Takes a free stream; waits until there is one."""
        return self._free.get()

    def try_to_take(self) -> CudaStream | None:
        """Takes a free stream, or returns None if there is none."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return None

    def put(self, stream: CudaStream) -> None:
        """Puts back a stream that was taken and has no work left."""
        self._free.put(stream)

    def release_idle(self) -> None:
        """Gives the memory of all free streams back to the device."""
        taken = []
        while (stream := self.try_to_take()) is not None:
            stream.release()
            taken.append(stream)
        for stream in taken:
            self._free.put(stream)
