"""The CUDA backend: splits a batch into chunks, each on its own stream, so that copies and kernels overlap."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from bngrad_kernels.backend import Backend
from bngrad_kernels.cuda import self_test
from bngrad_kernels.cuda.chunks.copy_plan import Copy, CopyPlan
from bngrad_kernels.cuda.chunks.cutting import halves, split_into_chunks
from bngrad_kernels.cuda.chunks.layout import LayoutCache, is_small
from bngrad_kernels.cuda.chunks.prepared import device_nbytes
from bngrad_kernels.cuda.descriptors import Piece, template
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.cuda.streams import AheadMemory, CudaDevice, CudaStream, StreamPool
from bngrad_kernels.errors import DeviceFailedError, DeviceUnavailableError
from bngrad_kernels.problem import AnyProblem, Array

STREAMS = 3
"""One copies in, one computes, one copies out."""

_PIECE_NBYTES, CHUNK_NBYTES = 96 << 20, 48 << 20
"""Large enough for copies at the bus's full speed, small enough for the three streams to overlap early."""
_AHEAD_FRACTION = 4
"""Copies ahead take at most one part in this many of the device memory."""


class CudaBackend(Backend):
    """Computes problems on a GPU. Thread-safe: batches of several threads overlap.

    Attributes:
        description: The device, its memory, compute capability, and versions.
        memory_nbytes: The size of its memory.
        errors: The exceptions of the device.
    """

    def __init__(
        self,
        device: CudaDevice,
        *,
        piece_nbytes: int = _PIECE_NBYTES,
        chunk_nbytes: int = CHUNK_NBYTES,
        stream_nbytes: int | None = None,
        most_nbytes: int | None = None,
    ) -> None:
        """Creates a backend.

        Args:
            device: The device to compute on.
            piece_nbytes: Larger problems are cut into ranges of channels of about this size on the device, if the
                ranges consist of runs that are long enough to be copied fast.
            chunk_nbytes: How much is on each of the three streams at a time, unless one piece is larger.
            stream_nbytes: Larger problems are cut in any case, down to a single channel; None for a quarter of
                ``most_nbytes``, for each of the three streams.
            most_nbytes: About how much device memory streams and copies ahead may take; None for nine tenths of it.
        """
        self.description = device.description
        self.memory_nbytes = device.memory_nbytes
        self.errors = device.errors
        self._device = device
        most_nbytes = min(most_nbytes or device.memory_nbytes, device.memory_nbytes // 10 * 9)
        self._ahead_nbytes = most_nbytes // _AHEAD_FRACTION
        self._stream_nbytes = stream_nbytes or (most_nbytes - self._ahead_nbytes) // STREAMS
        self._piece_nbytes, self._chunk_nbytes = piece_nbytes, min(chunk_nbytes, self._stream_nbytes)
        self._pool = StreamPool()
        self._layouts = LayoutCache()
        self._ahead: AheadMemory | None = None  # until `warm_up`

    @property
    def used_nbytes(self) -> int:
        """How much device memory streams and copies ahead have taken, without kernels and CUDA's own needs."""
        with self._failing():
            return self._pool.used_nbytes + (self._ahead.nbytes if self._ahead is not None else 0)

    @property
    def free_streams(self) -> int:
        """How many streams no batch is using."""
        return self._pool.free

    def warm_up(self) -> None:
        """Compiles every kernel, or loads it from the disk cache, and creates the streams.

        Raises:
            DeviceFailedError: This process cannot use the device.
            DeviceUnavailableError: The device does not have enough memory for the streams.
        """
        with self._failing():
            self._device.warm_up()
            self._ahead = self._device.ahead_memory(self._ahead_nbytes)
            try:
                self._chunk_nbytes = self._pool.open(self._device.stream, STREAMS, self._chunk_nbytes)
            except MemoryError as error:
                raise DeviceUnavailableError(f"{self.description}: {error}") from error

    def self_test(self, *, is_long: bool = False) -> int:
        """Runs the `self_test` and returns how many problems it computed.

        Raises:
            DeviceFailedError: The device computes wrong results, fails, or hangs.
            DeviceUnavailableError: The device does not have enough memory.
        """
        try:
            return self_test.run(self, is_long=is_long)
        except self_test.SelfTestError as error:
            raise DeviceFailedError(f"{self.description} failed its self-test: {error}") from error
        except MemoryError as error:
            raise DeviceUnavailableError(f"{self.description}: {error}") from error

    def register(self, memory: Array) -> None:
        """Page-locks memory that problems will use: copies are then fast and overlap with kernels."""
        self._device.register(memory)

    def unregister(self, memory: Array) -> None:
        """Undoes `register`. Must be called before the memory is freed."""
        with self._failing():
            self._device.unregister(memory)

    def copy_ahead(self, memory: Array) -> Any | None:
        """See `Backend.copy_ahead`; None for what is too small to be copied alone, or too large to be kept."""
        if self._ahead is None or is_small(memory.nbytes) or memory.nbytes > self._ahead_nbytes:
            return None
        with self._failing():
            return self._ahead.copy(memory)

    def finish_copy(self, copy: Any) -> None:
        """See `Backend.finish_copy`."""
        with self._failing():
            copy.wait()

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Writes the outputs of every problem.

        Raises:
            DeviceFailedError: This process can no longer use the device.
            MemoryError: The device does not have enough memory.
        """
        with self._failing():
            self.compute(problems)

    def compute(self, problems: Sequence[AnyProblem], *, is_streamed: bool = False) -> None:
        """Does the same, raises the device's own `errors`, and uses no resident kernel if ``is_streamed``."""
        traits = self._traits(is_streamed)
        in_flight: collections.deque[_InFlight] = collections.deque()
        try:
            chunks = split_into_chunks(problems, self._piece_nbytes, self._chunk_nbytes, self._fitting_nbytes(problems))
            for pieces in chunks:  # planned while the streams are busy
                self._start(pieces, traits, in_flight)
            self._finish_all(in_flight)
        finally:
            with contextlib.ExitStack() as stack:  # after a failure: nothing may be written once this returns
                for each in in_flight:
                    stack.callback(self._pool.put, each.stream)
                    stack.callback(each.stream.wait)

    def kernel_of(self, problem: AnyProblem, *, is_streamed: bool) -> str:
        """The name of the kernel by which `compute` computes a problem that it gets alone."""
        return template(problem.spec, problem.spec.channels, self._traits(is_streamed)).kernel.symbol

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except self.errors as error:
            raise DeviceFailedError(f"{self.description} failed: {error}") from error

    def _traits(self, is_streamed: bool) -> Traits:
        traits = self._device.traits
        return traits._replace(shared_nbytes=0) if is_streamed else traits

    def _fitting_nbytes(self, problems: Sequence[AnyProblem]) -> int:
        """How much a stream may hold; other processes may have taken most of the device since the last batch."""
        if all(device_nbytes(problem) <= self._chunk_nbytes for problem in problems):
            return self._stream_nbytes
        unused = self._device.free_nbytes() + self._pool.used_nbytes
        return max(1, min(self._stream_nbytes, unused // 10 * 9 // STREAMS))

    def _start(
        self, pieces: list[Piece], traits: Traits, in_flight: collections.deque[_InFlight], *, is_retry: bool = False
    ) -> None:
        """Starts a chunk. If memory is short, gives back what is idle and tries again, then starts smaller chunks."""
        plan = CopyPlan(pieces, traits, self._layouts)
        chunk = _InFlight(self._take_stream(in_flight), plan)
        try:
            chunk.reserve()
        except BaseException as error:
            self._pool.put(chunk.stream)  # nothing was enqueued on it
            parts = halves(pieces) if is_retry else [pieces]
            if not isinstance(error, MemoryError) or not parts:
                raise
        else:
            in_flight.append(chunk)
            chunk.start()
            return
        self._finish_all(in_flight)
        self._pool.release_idle()
        if self._ahead is not None:
            self._ahead.drop()
        for part in parts:
            self._start(part, traits, in_flight, is_retry=not is_retry)

    def _finish_all(self, in_flight: collections.deque[_InFlight]) -> None:
        while in_flight:
            self._pool.put(_finish_oldest(in_flight))

    def _take_stream(self, in_flight: collections.deque[_InFlight]) -> CudaStream:
        """Takes a free stream; if there is none, that of this batch's oldest chunk, once that is finished."""
        stream = self._pool.try_to_take()
        if stream is not None:
            return stream
        return _finish_oldest(in_flight) if in_flight else self._pool.take()


def _finish_oldest(in_flight: collections.deque[_InFlight]) -> CudaStream:
    stream = in_flight[0].finish()
    in_flight.popleft()
    return stream


class _InFlight:
    """A chunk on a stream."""

    def __init__(self, stream: CudaStream, plan: CopyPlan) -> None:
        self.stream = stream
        self._plan = plan
        self._upload: Array
        self._download: Array

    def reserve(self) -> None:
        """Takes all the memory that the chunk needs.

        Raises:
            MemoryError: There is not enough on the device, or page-locked on the host.
        """
        layout = self._plan.layout
        self.stream.reserve(layout.nbytes)
        first, second = layout.uploaded, layout.downloaded_nbytes
        staging = self.stream.staging(first + second)
        self._upload, self._download = staging[:first], staging[first:][:second]

    def start(self) -> None:
        """Enqueues all copies and launches."""
        plan, layout, stream = self._plan, self._plan.layout, self.stream
        plan.write_upload(self._upload, stream.address)
        stream.copy_in(Copy.of_bytes(self._upload, 0))
        for copy in plan.copied_in:
            stream.copy_in(copy)
        for launch in layout.launches:
            stream.launch(launch, layout.descriptors)
        for copy in plan.copied_out:
            stream.copy_out(copy)
        if layout.downloaded_nbytes:
            stream.copy_out(Copy.of_bytes(self._download, layout.downloaded))

    def finish(self) -> CudaStream:
        """Waits until all is done, and returns the stream."""
        self.stream.wait()
        self._plan.read_download(self._download)
        return self.stream
