"""The devices that the CUDA backend is tested on.

By default that is a CPU: the kernels' own source, compiled by g++, behind the interface of a GPU. With
``BNGRAD_TEST_DEVICE=cuda:0`` it is that GPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import weakref
from pathlib import Path

import numpy as np
import pytest

import bngrad_kernels.cuda
from bngrad_kernels import machine
from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.cuda.chunks.copy_plan import Copy
from bngrad_kernels.cuda.chunks.layout import Launch
from bngrad_kernels.cuda.device import CupyDevice
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.cuda.streams import CudaStream
from bngrad_kernels.problem import Array

TEST_DEVICE = os.environ.get("BNGRAD_TEST_DEVICE", "cpu")
HERE = Path(__file__).parent / "emulator"
SOURCES = Path(bngrad_kernels.cuda.__file__).parent
BUILT = Path(__file__).parents[3] / "build" / "emulator"
_ALIGNMENT = 256

TRAITS = Traits(processors=4, shared_nbytes=227 << 10, cache_nbytes=1 << 20)


def require_gxx() -> None:
    """Skips the calling test where g++ is missing, unless it must not be."""
    if shutil.which("g++") is None:
        sentence = "running the CUDA kernels on a CPU takes g++ and its ThreadSanitizer; on Debian: apt-get install g++"
        if os.environ.get("BNGRAD_REQUIRE_INTEROP"):
            pytest.fail(sentence)
        pytest.skip(sentence)


def compile_shared(out: Path, *options: str, sources: Path = SOURCES) -> Path:
    """Compiles the kernels and the emulator of CUDA."""
    command = [
        "g++", "-std=c++20", "-march=native", "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", "-fPIC",
        "-pthread", f"-I{sources}", f"-I{HERE}", *options, str(HERE / "kernels.cpp"), "-o", str(out),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return out


@functools.cache
def library_file() -> Path:
    """The file with the kernels for this CPU, which is kept for other processes until a source changes."""
    require_gxx()
    texts = [file.read_text() for file in sorted([*SOURCES.glob("*.cu*"), *HERE.iterdir(), Path(__file__)])]
    state = "".join([machine.processor(), *texts])
    BUILT.mkdir(parents=True, exist_ok=True)
    file = BUILT / f"{hashlib.sha256(state.encode()).hexdigest()}.so"
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            compile_shared(file.with_suffix(".part"), "-O2").rename(file)
    return file


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels for this CPU."""
    return ctypes.CDLL(str(library_file()))


class EmulatedDevice:
    """Emulates a GPU on a CPU: runs several blocks of a kernel at a time."""

    description = "emulated GPU"
    errors: tuple[type[Exception], ...] = ()
    memory_nbytes = 8 << 30

    def __init__(
        self, blocks: int = 5, os_threads: int = 2, kernels: ctypes.CDLL | None = None, traits: Traits = TRAITS
    ) -> None:
        self.traits = traits
        self._blocks, self._os_threads = blocks, os_threads
        self._kernels = kernels

    def warm_up(self) -> None:
        pass

    def free_nbytes(self) -> int:
        return self.memory_nbytes

    def stream(self) -> CudaStream:
        return EmulatedStream(self._kernels, self._blocks, self._os_threads)

    def ahead_memory(self, most_nbytes: int) -> EmulatedAheadMemory:
        return EmulatedAheadMemory(most_nbytes)

    def register(self, memory: Array) -> None:
        pass

    def unregister(self, memory: Array) -> None:
        pass


class EmulatedStream:
    """A stream that does all its work at once."""

    def __init__(self, kernels: ctypes.CDLL | None, blocks: int, os_threads: int) -> None:
        self._kernels, self._blocks, self._os_threads = kernels, blocks, os_threads
        self._memory = np.empty(0, np.uint8)
        self._staging = np.empty(0, np.uint8)
        self.address = 0
        self.nbytes = 0

    def reserve(self, nbytes: int) -> None:
        whole = np.full(nbytes + _ALIGNMENT, 0xFF, np.uint8)  # memory that was not written is NaN
        start = -whole.ctypes.data % _ALIGNMENT
        self._memory = whole[start : start + nbytes]
        self.address = self._memory.ctypes.data
        self.nbytes = nbytes

    def release(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self.nbytes = 0

    def staging(self, nbytes: int) -> Array:
        self._staging = np.full(nbytes, 0xFF, np.uint8)
        return self._staging

    def copy_in(self, copy: Copy) -> None:
        rows, ahead = copy.rows, copy.on_device
        if ahead is not None and ahead.memory is not None:
            rows = np.ndarray(rows.shape, np.uint8, ahead.memory, copy.host - ahead.host, rows.strides)
        self._memory[copy.offset :][: copy.rows.size].reshape(copy.rows.shape)[...] = rows

    def copy_out(self, copy: Copy) -> None:
        copy.rows[...] = self._memory[copy.offset :][: copy.rows.size].reshape(copy.rows.shape)

    def launch(self, launch: Launch, descriptors: int) -> None:
        kernels = self._kernels or library()
        kernels.launch_kernel(
            kernels[launch.kernel.symbol],
            *(ctypes.c_void_p(self.address + offset) for offset in (descriptors, launch.work_tiles)),
            ctypes.c_uint(launch.tile_count),
            ctypes.c_void_p(self.address + launch.tile_counter),
            ctypes.c_size_t(launch.shared_nbytes),
            self._blocks,
            self._os_threads,
        )

    def wait(self) -> None:
        pass


class EmulatedCopy:
    """A copy of host memory, until it is dropped."""

    def __init__(self, memory: Array) -> None:
        self.host: int = memory.ctypes.data
        self.memory: Array | None = memory.copy()

    def wait(self) -> None:
        pass


class EmulatedAheadMemory:
    """Memory for copies ahead."""

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._copies: weakref.WeakSet[EmulatedCopy] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        return sum(each.memory.nbytes for each in self._copies if each.memory is not None)

    def copy(self, memory: Array) -> EmulatedCopy:
        if self.nbytes + memory.nbytes > self._most_nbytes:
            raise MemoryError(f"no {memory.nbytes} bytes left for copies ahead")
        copy = EmulatedCopy(memory)
        self._copies.add(copy)
        return copy

    def drop(self) -> None:
        for copy in self._copies:
            copy.memory = None


def cuda_backend(
    blocks: int | None = None, os_threads: int = 2, *, is_streamed: bool = False, **sizes: int
) -> CudaBackend:
    """Creates a CUDA backend on the GPU that is tested, or on an emulated one.

    Args:
        blocks: How many blocks run at a time; None for the device's own choice.
        os_threads: How many threads run the blocks of an emulated GPU.
        is_streamed: Whether no kernel may be resident.
        sizes: See `CudaBackend`.
    """
    emulated = TEST_DEVICE == "cpu"
    device: CupyDevice | EmulatedDevice = EmulatedDevice(blocks or 5, os_threads) if emulated else gpu()
    if isinstance(device, CupyDevice) and blocks:
        device.blocks = blocks
    if is_streamed:
        device.traits = device.traits._replace(shared_nbytes=0)
    made = CudaBackend(device, **sizes)
    made.warm_up()
    return made


def gpu() -> CupyDevice:
    """The GPU that is tested."""
    return CupyDevice(int(TEST_DEVICE.removeprefix("cuda:")))
