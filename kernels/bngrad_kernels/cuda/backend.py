"""The CUDA backend: splits a batch into chunks, each on its own stream, so that copies and kernels overlap."""

from __future__ import annotations

import collections
import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Protocol

from bngrad_kernels.backend import Backend
from bngrad_kernels.cuda.copy_plan import Copy, CopyPlan, Launch, split_into_chunks
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.errors import DeviceFailedError, DeviceUnavailableError
from bngrad_kernels.problem import AnyProblem, Array

STREAMS = 3
"""One copies in, one computes, one copies out."""

_PIECE_NBYTES, _CHUNK_NBYTES = 96 << 20, 48 << 20
"""Large enough for copies at the bus's full speed, small enough for the three streams to overlap early."""


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

    def staging(self, nbytes: int) -> Array:
        """Returns host memory of that size to copy from and to."""

    def copy_in(self, copy: Copy) -> None:
        """Copies to the device."""

    def copy_out(self, copy: Copy) -> None:
        """Copies from the device."""

    def launch(self, launch: Launch, descriptors: int) -> None:
        """Launches a kernel. ``descriptors`` is the offset of the descriptors in the device memory, in bytes."""

    def wait(self) -> None:
        """Waits until all its work is done."""


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

    def stream(self) -> CudaStream:
        """Creates a stream."""

    def register(self, memory: Array) -> None:
        """Page-locks host memory, so that copies from and to it are fast and overlap."""

    def unregister(self, memory: Array) -> None:
        """Undoes `register`."""


class CudaBackend(Backend):
    """Computes problems on a GPU. Thread-safe: batches of several threads overlap.

    Attributes:
        description: The device, its memory, compute capability, and versions.
        memory_nbytes: The size of its memory.
    """

    def __init__(
        self,
        device: CudaDevice,
        *,
        piece_nbytes: int = _PIECE_NBYTES,
        chunk_nbytes: int = _CHUNK_NBYTES,
        stream_nbytes: int | None = None,
    ) -> None:
        """Creates a backend.

        Args:
            device: The device to compute on.
            piece_nbytes: Larger problems are cut into ranges of channels of about this size on the device, if the
                ranges consist of runs that are long enough to be copied fast.
            chunk_nbytes: How much is on each of the three streams at a time, unless one piece is larger.
            stream_nbytes: Larger problems are cut in any case, down to a single channel; None for three tenths of the
                device's memory.
        """
        self.description = device.description
        self.memory_nbytes = device.memory_nbytes
        self._device = device
        self._piece_nbytes, self._chunk_nbytes = piece_nbytes, chunk_nbytes
        self._stream_nbytes = stream_nbytes or device.memory_nbytes // 10 * 3
        self._free_streams: queue.SimpleQueue[CudaStream] = queue.SimpleQueue()
        self._streams: list[CudaStream] = []

    @property
    def used_nbytes(self) -> int:
        """How much device memory the streams have allocated, without kernels and CUDA's own needs."""
        return sum(stream.nbytes for stream in tuple(self._streams))

    @property
    def free_streams(self) -> int:
        """How many streams no batch is using."""
        return self._free_streams.qsize()

    def warm_up(self) -> None:
        """Compiles every kernel, or loads it from the disk cache, and creates the streams.

        Raises:
            DeviceFailedError: This process cannot use the device.
            DeviceUnavailableError: The device does not have enough memory for the streams.
        """
        with self._failing():
            self._device.warm_up()
            while len(self._streams) < STREAMS:
                stream = self._device.stream()
                try:
                    stream.reserve(self._chunk_nbytes)
                except MemoryError as error:
                    raise DeviceUnavailableError(f"{self.description}: {error}") from error
                self._streams.append(stream)
                self._free_streams.put(stream)

    def register(self, memory: Array) -> None:
        """Page-locks memory that problems will use: copies are then fast and overlap with kernels."""
        self._device.register(memory)

    def unregister(self, memory: Array) -> None:
        """Undoes `register`. Must be called before the memory is freed."""
        self._device.unregister(memory)

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Writes the outputs of every problem.

        Raises:
            DeviceFailedError: This process can no longer use the device.
            MemoryError: The device does not have enough memory.
        """
        with self._failing():
            self._run(problems)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except self._device.errors as error:
            raise DeviceFailedError(f"{self.description} failed: {error}") from error

    def _run(self, problems: Sequence[AnyProblem]) -> None:
        in_flight: collections.deque[_InFlight] = collections.deque()
        try:
            for pieces in split_into_chunks(problems, self._piece_nbytes, self._chunk_nbytes, self._stream_nbytes):
                plan = CopyPlan(pieces, self._device.traits)  # planned while the streams are busy
                in_flight.append(_InFlight(self._take_stream(in_flight), plan))
                in_flight[-1].start()
            while in_flight:
                self._free_streams.put(_finish_oldest(in_flight))
        finally:
            with contextlib.ExitStack() as stack:  # after a failure: nothing may be written once this returns
                for each in in_flight:
                    stack.callback(self._free_streams.put, each.stream)
                    stack.callback(each.stream.wait)

    def _take_stream(self, in_flight: collections.deque[_InFlight]) -> CudaStream:
        """Takes a free stream; if there is none, that of this batch's oldest chunk, once that is finished."""
        try:
            return self._free_streams.get_nowait()
        except queue.Empty:
            return _finish_oldest(in_flight) if in_flight else self._free_streams.get()


def _finish_oldest(in_flight: collections.deque[_InFlight]) -> CudaStream:
    stream = in_flight[0].finish()
    in_flight.popleft()
    return stream


class _InFlight:
    """A chunk on a stream."""

    def __init__(self, stream: CudaStream, plan: CopyPlan) -> None:
        self.stream = stream
        self._plan = plan
        self._download: Array | None = None

    def start(self) -> None:
        """Enqueues all copies and launches."""
        plan, stream = self._plan, self.stream
        stream.reserve(plan.nbytes)
        first, nbytes = plan.downloaded
        staging = stream.staging(plan.uploaded + nbytes)
        upload, self._download = staging[: plan.uploaded], staging[plan.uploaded :][:nbytes]
        plan.write_upload(upload, stream.address)
        stream.copy_in(Copy(upload.reshape(1, -1), 0))
        for copy in plan.copied_in:
            stream.copy_in(copy)
        for launch in plan.launches:
            stream.launch(launch, plan.descriptors)
        for copy in plan.copied_out:
            stream.copy_out(copy)
        if nbytes:
            stream.copy_out(Copy(self._download.reshape(1, -1), first))

    def finish(self) -> CudaStream:
        """Waits until all is done, and returns the stream."""
        self.stream.wait()
        assert self._download is not None
        self._plan.read_download(self._download)
        return self.stream
