"""GPGPU-Sim as a device of the CUDA backend: it runs NVRTC's PTX, cycle by cycle, without a GPU.

A process can have one device. The simulator reads its configuration from the working directory, and writes there.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tests.kernels.cuda.devices import EmulatedAheadMemory

from bngrad_kernels.cuda.compiler import compile_kernels
from bngrad_kernels.cuda.copy_plan import Copy, Launch
from bngrad_kernels.cuda.device import BLOCKS_PER_PROCESSOR
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.cuda.plan import THREADS
from bngrad_kernels.cuda.streams import CudaStream
from bngrad_kernels.problem import Array

_TO_DEVICE, _TO_HOST = 1, 2
_ALIGNMENT = 128


def configure(folder: Path, simulator: Path, settings: Mapping[str, object]) -> None:
    """Writes the configuration of a V100, with some of its settings replaced, into a folder."""
    sources = simulator / "sources" / "configs" / "tested-cfgs" / "SM7_QV100"
    for source in sources.iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    path = folder / "gpgpusim.config"
    text = path.read_text()
    for name, value in settings.items():
        text, replaced = re.subn(rf"^-{name}\s.*(?:\n\s+\w.*)*", f"-{name} {value}", text, flags=re.MULTILINE)
        assert replaced == 1, name
    path.write_text(text)


class SimulatedDevice:
    """A GPU simulated by GPGPU-Sim with the configuration in the working directory."""

    description = "GPGPU-Sim"
    errors: tuple[type[Exception], ...] = ()
    memory_nbytes = 1 << 30

    def __init__(self, simulator: Path, traits: Traits, arch: int = 70) -> None:
        """Creates a device by what build.sh has made; ``traits`` must agree with the simulator's configuration.

        The simulator lacks some newer instructions: from ``arch`` 80 on, the bfloat16 kernels are left out.
        """
        self.traits = traits
        self.blocks = BLOCKS_PER_PROCESSOR * traits.processors
        self._simulator = simulator
        self._arch = arch

    def warm_up(self) -> None:
        self.load(compile_kernels(self._arch).ptx)

    def load(self, ptx: str) -> None:
        if "CUDA_INSTALL_PATH" not in os.environ:
            os.environ["CUDA_INSTALL_PATH"] = str(self._simulator / "cuda")
        os.environ["GPGPUSIM_ROOT"] = str(self._simulator / "sources")
        os.environ["GPGPUSIM_CONFIG"] = os.environ["GPGPUSIM_SETUP_ENVIRONMENT_WAS_RUN"] = "1"
        entries = [entry for entry in re.split(r"(?=\.visible \.entry)", ptx) if "bf16x2" not in entry]
        resources = re.sub(r"\.version .*", ".version 7.8", "".join(entries))  # for the ptxas of CUDA 11
        Path("resources.ptx").write_text(resources)
        Path("kernels.ptx").write_text(known_to_simulator("".join(map(_with_dynamic_shared, entries))))
        self.library = ctypes.CDLL(str(self._simulator / "libsimulator.so"))
        self.library.simulator_kernel.restype = ctypes.c_void_p
        self.library.simulator_load(b"kernels.ptx", b"resources.ptx", self._arch)

    def run(
        self, symbol: str, blocks: int, threads: int, *arguments: ctypes._SimpleCData[int], shared: int = 0
    ) -> None:
        """Launches a kernel, and waits for it."""
        kernel = ctypes.c_void_p(self.library.simulator_kernel(symbol.encode(), shared))
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        assert self.library.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, None, places, None) == 0
        self.library.cudaDeviceSynchronize()

    def free_nbytes(self) -> int:
        return self.memory_nbytes

    def stream(self) -> CudaStream:
        return SimulatedStream(self)

    def ahead_memory(self, most_nbytes: int) -> EmulatedAheadMemory:
        return EmulatedAheadMemory(most_nbytes)

    def register(self, memory: Array) -> None:
        pass

    def unregister(self, memory: Array) -> None:
        pass


class SimulatedStream:
    """A stream that does all its work at once."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._staging = np.empty(0, np.uint8)
        self.address = 0
        self.nbytes = 0

    def reserve(self, nbytes: int) -> None:
        if nbytes > self.nbytes:
            self.address, self.nbytes = allocate(self._device, nbytes), nbytes

    def release(self) -> None:
        pass  # the simulator has no function that frees memory

    def staging(self, nbytes: int) -> Array:
        self._staging = np.full(nbytes, 0xFF, np.uint8)
        return self._staging

    def copy_in(self, copy: Copy) -> None:
        self._copy(copy, np.ascontiguousarray(copy.rows), _TO_DEVICE)

    def copy_out(self, copy: Copy) -> None:
        rows = np.empty(copy.rows.shape, np.uint8)
        self._copy(copy, rows, _TO_HOST)
        copy.rows[...] = rows

    def launch(self, launch: Launch, descriptors: int) -> None:
        table, work_tiles, tile_counter = (
            ctypes.c_uint64(self.address + offset) for offset in (descriptors, launch.work_tiles, launch.tile_counter)
        )
        blocks = min(launch.tile_count, self._device.blocks)
        arguments = table, work_tiles, ctypes.c_uint32(launch.tile_count), tile_counter
        self._device.run(launch.kernel.symbol, blocks, THREADS, *arguments, shared=launch.shared_nbytes)

    def wait(self) -> None:
        pass

    def _copy(self, copy: Copy, rows: Array, kind: int) -> None:
        there, here = ctypes.c_void_p(self.address + copy.offset), ctypes.c_void_p(rows.ctypes.data)
        target, source = (there, here) if kind == _TO_DEVICE else (here, there)
        if rows.nbytes:
            assert self._device.library.cudaMemcpy(target, source, ctypes.c_size_t(rows.nbytes), kind) == 0


def allocate(device: SimulatedDevice, nbytes: int) -> int:
    address = ctypes.c_void_p()
    assert device.library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes)) == 0
    assert address.value is not None
    return address.value


def known_to_simulator(ptx: str) -> str:
    """The PTX in instructions that GPGPU-Sim knows.

    It executes an instruction when it is issued, in order, so that an acquire is any load, a release any store; and it
    has fences, which count as time.
    """
    for pattern, instead in (
        (r"\.version .*", ".version 7.0"),
        (r"\.target .*", ".target sm_70"),
        (r"ld\.acquire\.gpu\.global", "ld.volatile.global"),
        (r"st\.release\.gpu\.global", "membar.gl;\n\tst.volatile.global"),
        (r"atom\.acq_rel\.gpu\.global", "membar.gl;\n\tatom.global"),
        (r"(shfl\.sync\.\S+\s+%r\d+)\|%p\d+", r"\1"),  # the predicate is not used
        (r"nanosleep\.u32\s+\S+;", ""),
        (r"\.extern \.shared .*\[\];", ""),
    ):
        ptx = re.sub(pattern, instead, ptx)
    return ptx


def _with_dynamic_shared(entry: str) -> str:
    """Puts a kernel's dynamic shared memory behind its static one; the simulator puts both at 0."""
    static = re.search(r"\.shared \.align \d+ \.b8 (\S+)\[(\d+)\]", entry)
    if static is None:
        return entry
    behind = -(-int(static[2]) // _ALIGNMENT) * _ALIGNMENT
    moved = rf"mov.u64 \1, {static[1]};\n\tadd.s64 \1, \1, {behind};"
    return re.sub(r"mov\.u64\s+(%rd\d+), \w*memoryE;", moved, entry)
