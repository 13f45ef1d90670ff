"""A GPU through CuPy: memory, copies, launches."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from bngrad_kernels.cuda import compiler, host_memory
from bngrad_kernels.cuda.chunks.copy_plan import Copy
from bngrad_kernels.cuda.chunks.layout import Launch
from bngrad_kernels.cuda.descriptors import every_kernel
from bngrad_kernels.cuda.kernel_selection import KernelKind, Traits, most_resident_nbytes
from bngrad_kernels.cuda.plan import THREADS
from bngrad_kernels.errors import DeviceUnavailableError
from bngrad_kernels.problem import Array

BLOCKS_PER_PROCESSOR = 2
"""batch_norm_grad.cu limits the registers of most kernels for this. If a multiprocessor holds fewer blocks, the rest
start once all work tiles are handed out, and end at once."""

_OLDEST_DRIVERS = {12: 525, 13: 580}
_PORTABLE = 1  # cudaHostRegisterPortable
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_LARGEST_PITCH = (1 << 31) - 1
"""The maximum distance of rows that one call copies; see cudaDevAttrMaxPitch."""


def count() -> int:
    """Returns the number of GPUs, at least 1.

    Raises:
        DeviceUnavailableError: There is none; the message says why.
    """
    try:
        from cupy.cuda import runtime  # noqa: PLC0415 - optional
    except ImportError as error:
        raise DeviceUnavailableError(
            f"CuPy cannot be imported ({error}): pip install '.[cuda12]' or '.[cuda13]' in a checkout of bngrad "
            "brings it"
        ) from error
    try:
        found: int = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        cuda = runtime.runtimeGetVersion() // 1000
        needed = f"NVIDIA's driver {_OLDEST_DRIVERS.get(cuda, '')} or newer is needed for CUDA {cuda}"
        raise DeviceUnavailableError(
            f"CUDA finds no usable driver or GPU: {error}; {needed}, and in a container --gpus all"
        ) from error
    if found == 0:
        raise DeviceUnavailableError("CUDA finds no GPU")
    return found


class CupyDevice:
    """One GPU.

    Attributes:
        description: Its name, memory, compute capability, and the versions of driver and CuPy.
        errors: The exceptions of CUDA after which the process has to end.
        blocks: The maximum number of blocks of a launch.
        traits: The properties that the choice of kernels depends on.
        memory_nbytes: The size of its memory.
    """

    def __init__(self, ordinal: int) -> None:
        """Opens the GPU of a number, from 0.

        Raises:
            DeviceUnavailableError: It does not exist or is too old, or CuPy, NVRTC or the driver is missing.
        """
        found = count()
        if ordinal >= found:
            raise DeviceUnavailableError(f"there is no cuda:{ordinal}: CUDA finds {found} GPU{'s'[: found != 1]}")
        import cupy  # noqa: PLC0415
        from cupy.cuda import driver, runtime  # noqa: PLC0415

        self._cupy, self._runtime = cupy, runtime
        self.ordinal = ordinal
        self.errors: tuple[type[Exception], ...] = (runtime.CUDARuntimeError, driver.CUDADriverError)
        try:
            self.use()
            properties = runtime.getDeviceProperties(ordinal)
        except runtime.CUDARuntimeError as error:
            raise DeviceUnavailableError(f"CUDA cannot use this GPU: {error}") from error
        capability = properties["major"], properties["minor"]
        compiler.compiler_version()
        self._arch = compiler.architecture(capability, compiler.supported_architectures())
        self.traits = Traits(
            processors=properties["multiProcessorCount"],
            shared_nbytes=properties["sharedMemPerBlockOptin"],
            cache_nbytes=properties["l2CacheSize"],
        )
        self.memory_nbytes: int = properties["totalGlobalMem"]
        self.blocks = BLOCKS_PER_PROCESSOR * self.traits.processors
        version = runtime.driverGetVersion()
        self.description = (
            f"{properties['name'].decode()}, {self.memory_nbytes / 2**30:.0f} GiB, "
            f"compute capability {capability[0]}.{capability[1]}, driver {version // 1000}.{version % 1000 // 10}, "
            f"CuPy {cupy.__version__}"
        )
        self._most_resident_nbytes = most_resident_nbytes(self.traits)
        self._kernels: dict[str, Any] = {}

    def use(self) -> None:
        """Makes it the calling thread's device."""
        self._runtime.setDevice(self.ordinal)

    def warm_up(self) -> None:
        """Compiles the kernels or takes them from the disk cache, and loads them; later, loading could block."""
        self.use()
        module = self._cupy.RawModule(path=str(compiler.cubin(self._arch)))
        for each in every_kernel():
            kernel = self._kernels[each.symbol] = module.get_function(each.symbol)
            if each.kind is KernelKind.RESIDENT:
                kernel.max_dynamic_shared_size_bytes = self._most_resident_nbytes

    def free_nbytes(self) -> int:
        """How much of its memory no process has taken."""
        self.use()
        free, _ = self._runtime.memGetInfo()
        return int(free)

    def kernel(self, symbol: str) -> Any:
        """A loaded kernel."""
        return self._kernels[symbol]

    def stream(self) -> CupyStream:
        """Creates a stream."""
        return CupyStream(self)

    def ahead_memory(self, most_nbytes: int) -> CupyAheadMemory:
        """Creates memory for copies ahead."""
        return CupyAheadMemory(self, most_nbytes)

    def register(self, memory: Array) -> None:
        """Page-locks memory of the host."""
        self.use()
        host_memory.populate(memory, host_memory.node_of(self._runtime.deviceGetPCIBusId(self.ordinal)))
        self._runtime.hostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE)

    def unregister(self, memory: Array) -> None:
        """Undoes `register`."""
        self.use()
        self._runtime.hostUnregister(memory.ctypes.data)


class CupyStream:
    """A CUDA stream with a block of device memory and one of page-locked host memory.

    Attributes:
        nbytes: The size of the block of device memory.
    """

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        device.use()
        self._cupy, self._runtime = device._cupy, device._runtime
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._done = self._cupy.cuda.Event(block=True, disable_timing=True)
        self._memory: Any = None  # freed with the stream
        self._read: list[Any] = []  # memory of copies ahead that its work reads
        self.nbytes = 0
        self._staging = np.empty(0, np.uint8)

    @property
    def address(self) -> int:
        """The start of its device memory."""
        address: int = self._memory.ptr
        return address

    def reserve(self, nbytes: int) -> None:
        """Grows its device memory to at least ``nbytes``; the address may change."""
        self._device.use()
        if nbytes <= self.nbytes:
            return
        self.release()
        with self._short_of(f"the GPU has no {nbytes} bytes left"):
            self._memory = self._cupy.cuda.Memory(nbytes)
        self.nbytes = nbytes

    def release(self) -> None:
        """Gives its device memory back."""
        self._device.use()
        self._memory, self.nbytes = None, 0

    def staging(self, nbytes: int) -> Array:
        """Returns page-locked memory: the same as before, unless that is too small."""
        if nbytes > self._staging.nbytes:
            size = 1 << (nbytes - 1).bit_length()
            with self._short_of(f"the host has no {size} bytes left that can be page-locked"):
                self._staging = np.frombuffer(self._cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        return self._staging[:nbytes]

    @contextlib.contextmanager
    def _short_of(self, sentence: str) -> Iterator[None]:
        """Raises MemoryError where CUDA is out of memory, after which the process can still use the device."""
        try:
            yield
        except self._runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            raise MemoryError(sentence) from error

    def copy_in(self, copy: Copy) -> None:
        """Copies to the device, from where the bytes are on it already, if they are."""
        memory = copy.on_device and copy.on_device.memory
        if memory is None:
            self._copy(copy, copy.host, self._runtime.memcpyHostToDevice)
            return
        self._read.append(memory)
        self._stream.wait_event(copy.on_device.copied)
        self._copy(copy, memory.ptr + copy.host - copy.on_device.host, self._runtime.memcpyDeviceToDevice)

    def copy_out(self, copy: Copy) -> None:
        """Copies from the device."""
        self._copy(copy, copy.host, self._runtime.memcpyDeviceToHost)

    def launch(self, launch: Launch, descriptors: int) -> None:
        """Launches a kernel on as many blocks as the GPU holds at a time."""
        addresses = (self.address + offset for offset in (descriptors, launch.work_tiles, launch.tile_counter))
        table, work_tiles, tile_counter = map(np.uint64, addresses)
        blocks = min(launch.tile_count, self._device.blocks)
        kernel = self._device.kernel(launch.kernel.symbol)
        arguments = table, work_tiles, np.uint32(launch.tile_count), tile_counter
        kernel((blocks,), (THREADS,), arguments, shared_mem=launch.shared_nbytes, stream=self._stream)

    def wait(self) -> None:
        """Waits until all its work is done; sleeps meanwhile, where a stream's own wait would take a core."""
        self._done.record(self._stream)
        self._done.synchronize()
        self._read.clear()

    def _copy(self, copy: Copy, here: int, kind: int) -> None:
        """Copies between the stream's memory and rows that begin at ``here`` and are as far apart as the host's."""
        rows, width = copy.rows.shape
        there, pitch = self.address + copy.offset, copy.rows.strides[0]
        is_out = kind == self._runtime.memcpyDeviceToHost
        places = ((here, pitch), (there, width)) if is_out else ((there, width), (here, pitch))
        (target, target_pitch), (source, source_pitch) = places
        if rows > 1 and max(target_pitch, source_pitch) <= _LARGEST_PITCH:
            self._runtime.memcpy2DAsync(target, target_pitch, source, source_pitch, width, rows, kind, self._stream.ptr)
            return
        for row in range(rows):
            ends = target + row * target_pitch, source + row * source_pitch
            self._runtime.memcpyAsync(*ends, width, kind, self._stream.ptr)


class CupyCopy:
    """A copy of host memory on a GPU.

    Attributes:
        host: The address of the host memory.
        memory: The device memory; None once it was given back.
        copied: The event after which the bytes are there.
    """

    def __init__(self, host: int, memory: Any, copied: Any) -> None:
        self.host = host
        self.memory: Any | None = memory
        self.copied = copied

    def wait(self) -> None:
        """Waits, in a thread that uses the device, until the bytes are there."""
        self.copied.synchronize()


class CupyAheadMemory:
    """Device memory for copies ahead, from a pool, since allocations of CUDA wait for all kernels."""

    def __init__(self, device: CupyDevice, most_nbytes: int) -> None:
        """Takes nothing yet, and at most ``most_nbytes``."""
        self._device = device
        device.use()
        self._cupy, self._runtime = device._cupy, device._runtime
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._pool = self._cupy.cuda.MemoryPool()
        self._pool.set_limit(size=most_nbytes)
        self._mutex = threading.Lock()
        self._copies: weakref.WeakSet[CupyCopy] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """How much it has taken of the device."""
        self._device.use()  # a pool has a part for each device, and looks at that of the thread
        return int(self._pool.total_bytes())

    def copy(self, memory: Array) -> CupyCopy:
        """Begins to copy host memory."""
        self._device.use()
        block = self._allocate(memory.nbytes)
        host = memory.ctypes.data
        self._runtime.memcpyAsync(block.ptr, host, memory.nbytes, self._runtime.memcpyHostToDevice, self._stream.ptr)
        copied = self._cupy.cuda.Event(block=True, disable_timing=True)
        copied.record(self._stream)
        copy = CupyCopy(host, block, copied)
        with self._mutex:
            self._copies.add(copy)
        return copy

    def drop(self) -> None:
        """Gives the memory of all copies back."""
        self._device.use()
        with self._mutex:
            copies = list(self._copies)
        for copy in copies:
            copy.memory = None
        self._pool.free_all_blocks()

    def _allocate(self, nbytes: int) -> Any:
        """Takes memory; free blocks of other sizes count up to the pool's limit until they are given back."""
        try:
            return self._pool.malloc(nbytes)
        except MemoryError:
            self._pool.free_all_blocks()
            return self._pool.malloc(nbytes)
