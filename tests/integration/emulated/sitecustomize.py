"""Gives every Python process that has this folder on its path two GPUs, which a CPU stands in for.

That is how a server of a test, whose workers are processes of their own, comes to have GPUs where there are none.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import tests.integration.copied_early.sitecustomize  # noqa: F401 - this one takes its place
from tests.kernels.cuda.devices import EmulatedAheadMemory, EmulatedCopy, EmulatedDevice

from bngrad_kernels.cuda import CudaBackend, device, probe
from bngrad_kernels.cuda.chunks.copy_plan import Copy
from bngrad_kernels.cuda.chunks.layout import Launch
from bngrad_kernels.cuda.streams import CudaStream
from bngrad_kernels.problem import Array

KERNELS = os.environ["EMULATED_KERNELS"]
FOLDER = Path(KERNELS).parent
POISON, NO_PINNING = FOLDER / "poison", FOLDER / "no-pinning"
"""Where there is such a file, the next launch fails as an illegal access does; page-locking is refused."""
GATE, DEADLY = FOLDER / "gate", FOLDER / "deadly"
"""Where there is such a file, a launch for float16 waits while it is locked; one for bfloat16 kills its process."""


class CudaError(Exception):
    """What CUDA raises."""


class Gpu(EmulatedDevice):
    errors = (CudaError,)

    def __init__(self, ordinal: int) -> None:
        super().__init__(kernels=ctypes.CDLL(KERNELS))
        self.description = f"emulated GPU {ordinal}"

    def stream(self) -> CudaStream:
        stream: Any = super().stream()
        launch = stream.launch

        def launch_with_incidents(what: Launch, descriptors: int) -> None:
            if POISON.exists():
                POISON.unlink()
                raise CudaError("an illegal memory access was encountered")
            if GATE.exists() and what.kernel.dtype == "float16":
                wait_at_gate()
            if DEADLY.exists() and what.kernel.dtype == "bfloat16":
                os.kill(os.getpid(), signal.SIGKILL)
            launch(what, descriptors)

        def copy_in_and_tell(copy: Copy) -> None:
            if copy.on_device is not None:
                tell(f"read {copy.rows.size} bytes from a copy ahead")
            copy_in(copy)

        stream.launch, copy_in, stream.copy_in = launch_with_incidents, stream.copy_in, copy_in_and_tell
        made: CudaStream = stream
        return made

    def ahead_memory(self, most_nbytes: int) -> EmulatedAheadMemory:
        return Ahead(most_nbytes, self.description)

    def register(self, memory: Array) -> None:
        if NO_PINNING.exists():
            raise CudaError("out of memory")
        tell(f"page-locked {memory.nbytes} bytes")

    def unregister(self, memory: Array) -> None:
        tell(f"page-unlocked {memory.nbytes} bytes")


class Ahead(EmulatedAheadMemory):
    def __init__(self, most_nbytes: int, gpu: str) -> None:
        super().__init__(most_nbytes)
        self._gpu = gpu

    def copy(self, memory: Array) -> EmulatedCopy:
        copy = super().copy(memory)
        tell(f"{self._gpu} copied {memory.nbytes} bytes ahead")
        weakref.finalize(copy, tell, f"{self._gpu} dropped {memory.nbytes} bytes")
        return copy


def tell(what: str) -> None:
    os.write(2, f"{what}\n".encode())  # at once: print writes the line's end apart, and both GPUs may tell something


def wait_at_gate() -> None:
    with GATE.open() as gate:
        try:
            fcntl.flock(gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"worker {os.getpid()} waits at the gate")
            fcntl.flock(gate, fcntl.LOCK_SH)


setattr(CudaBackend, "self_test", lambda self: 0)  # noqa: B010 - the incidents are for requests
setattr(device, "CupyDevice", Gpu)  # noqa: B010 - it is another class
probe.usable = lambda: (["cuda:0", "cuda:1"], ["cuda:2: its compute capability 6.1 is too old"])  # type: ignore[assignment]
