"""The CUDA back end: chunks of problems, each on a lane of its own, so that copies and kernels overlap."""

from __future__ import annotations

import collections
import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import Protocol

from bngrad_kernels.cuda.copy_plan import Chunk, Launch, Move, divide
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.errors import DeviceFailedError, DeviceUnavailableError
from bngrad_kernels.problem import AnyProblem, Array

LANES = 3
"""One copies in, one computes, one copies out."""

_PIECE_NBYTES, _CHUNK_NBYTES = 96 << 20, 48 << 20
"""Long enough copies to reach the bus's full speed, short enough for the three lanes to overlap soon."""


class Lane(Protocol):
    """A queue of work on a device, with memory of its own on it. What is asked for is done later, but in order."""

    @property
    def address(self) -> int:
        """Where its memory on the device starts, a multiple of 256."""

    @property
    def nbytes(self) -> int:
        """The size of that memory."""

    def reserve(self, nbytes: int) -> None:
        """Sees to it that its memory on the device has that many bytes; it may have to move.

        Raises:
            MemoryError: The device has not got them.
        """

    def staging(self, nbytes: int) -> Array:
        """Memory of the host to copy from and to, of that many bytes."""

    def copy_in(self, move: Move) -> None:
        """Copies to the device."""

    def copy_out(self, move: Move) -> None:
        """Copies from the device."""

    def launch(self, launch: Launch, descriptors: int) -> None:
        """Runs a kernel, with the descriptors that are so many bytes from the start."""

    def wait(self) -> None:
        """Returns when all that was asked for is done."""


class Device(Protocol):
    """A GPU, or what stands in for one."""

    description: str

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What is raised when the device cannot be used any more."""

    @property
    def traits(self) -> Traits:
        """What the choice of engines depends on."""

    @property
    def memory_nbytes(self) -> int:
        """The size of its memory."""

    def warm_up(self) -> None:
        """Compiles or loads the kernels."""

    def lane(self) -> Lane:
        """A new lane."""

    def register(self, memory: Array) -> None:
        """Page-locks memory of the host, so that copies from and to it are fast and overlap."""

    def unregister(self, memory: Array) -> None:
        """Undoes `register`."""


class CudaBackend:
    """Computes problems on a GPU. Threads may share it: their batches overlap.

    Attributes:
        description: The device, its memory, compute capability, and versions.
        memory_nbytes: The size of its memory.
    """

    def __init__(
        self,
        device: Device,
        *,
        piece_nbytes: int = _PIECE_NBYTES,
        chunk_nbytes: int = _CHUNK_NBYTES,
        lane_nbytes: int | None = None,
    ) -> None:
        """Makes a back end.

        Args:
            device: What it computes on.
            piece_nbytes: Larger problems are cut into ranges of channels of about this size on the device, where a
                range is made of long enough runs to be copied fast.
            chunk_nbytes: How much is on each of three lanes at a time, unless one piece is larger.
            lane_nbytes: Larger problems are cut in any case, down to a single channel; three tenths of the device's
                memory where None.
        """
        self.description = device.description
        self.memory_nbytes = device.memory_nbytes
        self._device = device
        self._piece_nbytes, self._chunk_nbytes = piece_nbytes, chunk_nbytes
        self._lane_nbytes = lane_nbytes or device.memory_nbytes // 10 * 3
        self._lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()  # those that are free
        self._all_lanes: list[Lane] = []

    @property
    def used_nbytes(self) -> int:
        """How much of the device's memory it has taken, kernels and what CUDA itself needs left aside."""
        return sum(lane.nbytes for lane in tuple(self._all_lanes))

    def warm_up(self) -> None:
        """Compiles every kernel, or loads it from the disk cache, and opens the lanes.

        Raises:
            DeviceFailedError: This process cannot use the device.
            DeviceUnavailableError: The device has not got enough memory for the lanes.
        """
        with self._failing():
            self._device.warm_up()
            while len(self._all_lanes) < LANES:
                lane = self._device.lane()
                try:
                    lane.reserve(self._chunk_nbytes)
                except MemoryError as error:
                    raise DeviceUnavailableError(f"{self.description}: {error}") from error
                self._all_lanes.append(lane)
                self._lanes.put(lane)

    def register(self, memory: Array) -> None:
        """Page-locks memory that problems will lie in: copies are then fast and overlap with kernels."""
        self._device.register(memory)

    def unregister(self, memory: Array) -> None:
        """Undoes `register`, before the memory is given back."""
        self._device.unregister(memory)

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Writes the outputs of every problem.

        Raises:
            DeviceFailedError: This process cannot use the device any more.
            MemoryError: The device has not got enough of it.
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
        started: collections.deque[_Flight] = collections.deque()
        try:
            for pieces in divide(problems, self._piece_nbytes, self._chunk_nbytes, self._lane_nbytes):
                chunk = Chunk(pieces, self._device.traits)  # while the lanes are busy
                started.append(_Flight(self._lane(started), chunk))
                started[-1].start()
            while started:
                self._lanes.put(_finish_oldest(started))
        finally:
            with contextlib.ExitStack() as stack:  # one has failed: nothing may be written once this returns
                for flight in started:
                    stack.callback(self._lanes.put, flight.lane)
                    stack.callback(flight.lane.wait)

    def _lane(self, started: collections.deque[_Flight]) -> Lane:
        """A free lane; that of the oldest chunk of this batch if there is one and all are taken."""
        try:
            return self._lanes.get_nowait()
        except queue.Empty:
            return _finish_oldest(started) if started else self._lanes.get()


def _finish_oldest(started: collections.deque[_Flight]) -> Lane:
    lane = started[0].finish()
    started.popleft()
    return lane


class _Flight:
    """A chunk on a lane."""

    def __init__(self, lane: Lane, chunk: Chunk) -> None:
        self.lane = lane
        self._chunk = chunk
        self._download: Array | None = None

    def start(self) -> None:
        """Asks for all that it takes."""
        chunk, lane = self._chunk, self.lane
        lane.reserve(chunk.nbytes)
        first, nbytes = chunk.downloaded
        staging = lane.staging(chunk.uploaded + nbytes)
        upload, self._download = staging[: chunk.uploaded], staging[chunk.uploaded :][:nbytes]
        chunk.write_upload(upload, lane.address)
        lane.copy_in(Move(upload.reshape(1, -1), 0))
        for move in chunk.copied_in:
            lane.copy_in(move)
        for launch in chunk.launches:
            lane.launch(launch, chunk.descriptors)
        for move in chunk.copied_out:
            lane.copy_out(move)
        if nbytes:
            lane.copy_out(Move(self._download.reshape(1, -1), first))

    def finish(self) -> Lane:
        """Waits for it, and returns its lane."""
        self.lane.wait()
        assert self._download is not None
        self._chunk.read_download(self._download)
        return self.lane
