"""``python -m benchmarks.gpu.simulated FOLDER``: kernels on an eighth of an H200 that GPGPU-Sim simulates.

FOLDER is where tests/gpu/simulator/build.sh has put the simulator. Cycles are compared with those of a kernel that only
reads two tensors and writes one. The simulator executes PTX, instruction by instruction, not the machine code of ptxas:
the ratios and the list of waits serve to compare versions of the kernels; they are no forecast.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.gpu.simulator.device import SimulatedDevice, allocate, configure
from tests.kernels.problems import first_order_problem

from bngrad_kernels.cuda import kernel_selection, plan
from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.cuda.compiler import compile_source, fingerprint
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.spec import FLOAT16, FLOAT32, Spec

ROOT = Path(__file__).parents[2]
PART, ARCH = 8, 90
_READ_NBYTES = 32
TRAITS = Traits(16, 227 << 10, 6 << 20)
SETTINGS = {
    "gpgpu_n_clusters": TRAITS.processors,
    "gpgpu_clock_domains": "1755:1755:1755:1172",
    # 16 channels of 37.5 GB/s, HBM's latencies in cycles of their clock.
    "gpgpu_n_mem": 16,
    "gpgpu_dram_buswidth": 16,
    "gpgpu_dram_timing_opt": '"nbk=16:CCD=1:RRD=4:RCD=17:RAS=39:RP=17:RC=55:'
    'CL=17:WL=3:CDLR=4:WR=14:nbkgrp=4:CCDL=2:RTPL=4"',
    "gpgpu_frfcfs_dram_sched_queue_size": 128,
    "dram_latency": 300,
    "gpgpu_l2_rop_latency": 250,
    "gpgpu_cache:dl2": "S:64:128:24,L:B:m:L:P,A:1024:8,64:0,64",
    "gpgpu_cache:dl1": "S:4:128:64,L:T:m:L:L,A:4096:8,128:0,32",
    "gpgpu_unified_l1d_size": 256,
    "gpgpu_shmem_option": "0,8,16,32,64,100,132,164,196,228",
    "gpgpu_shmem_size": 228 << 10,
    "gpgpu_shmem_sizeDefault": 228 << 10,
    "gpgpu_shmem_per_block": 227 << 10,
    "gpgpu_perf_sim_memcpy": 0,
    "gpgpu_kernel_launch_latency": 0,
}
CASES = [
    Spec(FLOAT32, (16, 32, 3136), 1),
    Spec(FLOAT32, (16, 32, 3136), 1, is_training=False),
    Spec(FLOAT32, (1568, 256), 1),
    Spec(FLOAT16, (16, 64, 3136), 1),
]
THREE_TENSORS = """
extern "C" __global__ void __launch_bounds__(512, 2) three(const uint4 *a, const uint4 *b, uint4 *sum, unsigned count) {
    const unsigned step = gridDim.x * blockDim.x;
    for (unsigned first = blockIdx.x * blockDim.x + threadIdx.x; first < count; first += 4 * step) {
        uint4 p[4], q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (first + i * step < count) p[i] = __ldcs(a + first + i * step), q[i] = __ldcs(b + first + i * step);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i].x += q[i].x, p[i].y += q[i].y, p[i].z += q[i].z, p[i].w += q[i].w;
            if (first + i * step < count) __stcs(sum + first + i * step, p[i]);
        }
    }
}
"""


class Launch(NamedTuple):
    """The simulator's figures for one launch."""

    cycles: int
    read_nbytes: int  # from memory
    waits: list[str]  # the instructions that took the longest, the longest first


def main(simulator: Path) -> None:
    revision = ["git", "-C", str(simulator / "sources"), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(revision, capture_output=True, text=True, check=True).stdout.strip()
    print(f"kernels {fingerprint()}, GPGPU-Sim {commit}, compiled for sm_{ARCH}", flush=True)
    floors: dict[int, int] = {}
    for number, spec in enumerate(CASES):
        nbytes = spec.tensor_nbytes
        if nbytes not in floors:
            floors[nbytes] = simulated(simulator, "three", nbytes).cycles
        cycles, read_nbytes, waits = simulated(simulator, "case", number)
        mode = "training" if spec.is_training else "inference"
        print(f"{spec.dtype} {spec.shape} {mode}: {cycles} cycles, {cycles / floors[nbytes]:.2f} of three tensors'")
        print(f"    read from memory: {read_nbytes / 2 / nbytes:.2f} of two tensors; cycles to wait for:")
        print("".join(f"    {line}\n" for line in waits), end="", flush=True)


def simulated(simulator: Path, kind: str, number: int) -> Launch:
    """Calls `run` in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        configure(Path(folder), simulator, SETTINGS)
        command = [sys.executable, "-m", "benchmarks.gpu.simulated", str(simulator), kind, str(number)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        cycles, read = (int(re.findall(rf"{name} = (\d+)", done.stdout)[-1])
                        for name in ("gpu_sim_cycle", "total dram reads"))  # fmt: skip
        return Launch(cycles, _READ_NBYTES * read, list(itertools.islice(_waits(Path(folder)), 12)))


def _waits(folder: Path) -> Iterator[str]:
    source = (folder / "kernels.ptx").read_text().splitlines()
    counted = re.findall(r"kernels\.ptx (\d+) : (\d+) (\d+)", (folder / "gpgpu_inst_stats.txt").read_text())
    rows = {int(line): (int(cycles), int(count)) for line, count, cycles in counted}
    for line, (cycles, count) in sorted(rows.items(), key=lambda row: -row[1][0]):
        yield f"{cycles // max(count, 1):6} x {count // 32:7}  {' '.join(source[line - 1].split())}"


def run(simulator: Path, kind: str, number: int) -> None:
    """Runs a case, or the kernel of three tensors, in a process whose directory has the simulator's configuration."""
    device = SimulatedDevice(simulator, TRAITS, ARCH)
    if kind == "three":
        device.load(compile_source(THREE_TENSORS, "three.cu", ARCH).ptx)
        tensors = [ctypes.c_uint64(allocate(device, number)) for _ in range(3)]
        device.run("three", device.blocks, 512, *tensors, ctypes.c_uint32(number // 16))
        return
    plan._ENOUGH_TILES //= PART
    kernel_selection._MOST_AHEAD_NBYTES //= PART
    backend = CudaBackend(device, chunk_nbytes=1 << 20)
    backend.warm_up()
    backend.run([first_order_problem(CASES[number])])


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]).resolve())
    else:
        run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
