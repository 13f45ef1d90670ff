"""``python -m benchmarks.gpu.request_model``: what bounds a server's requests on GPUs that are not at hand.

The first table has the second order in training: the time of its kernel and of its copies, over that of moving five
tensors in the GPU's memory. The kernel is bound by its memory or by its additions, in float64 as it is, or if each sum
were two float32 numbers. The second table has a batch of requests of the first order: its copies, and the host's calls.

The instructions for each element are those of the machine code; the rest are data sheets' figures and common
measurements of CUDA. Nothing of it comes from a GPU; planning is measured on this processor.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from benchmarks.gpu.model import GPUS

from bngrad_kernels.cuda.backend import CHUNK_NBYTES
from bngrad_kernels.cuda.copy_plan import CopyPlan
from bngrad_kernels.cuda.descriptors import Piece
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import FLOAT32, Spec

CALL_S = 4e-6
"""The host's time for one call of CuPy that enqueues a copy or a launch."""
REQUESTS = 64
TENSOR = Spec(FLOAT32, (1568, 64), 1)
"""0.4 MB."""
_ROUNDS = 9
_FLOAT64_OPERATIONS, _FLOAT32_OPERATIONS = 11, 77
"""Of an element's seven sums in training: conversions, additions and products in float64, or in pairs of float32."""


class Rates(NamedTuple):
    """What `benchmarks.gpu.model.GPUS` leaves out.

    Attributes:
        float64: Operations of a multiprocessor in a cycle.
        float32: The same.
        bus: Bytes per second that page-locked copies move in each direction.
    """

    float64: int
    float32: int
    bus: float


RATES = {
    "T4": Rates(2, 64, 12e9),
    "L4": Rates(2, 128, 25e9),
    "A10": Rates(2, 128, 25e9),
    "A100": Rates(32, 64, 25e9),
    "H100": Rates(64, 128, 55e9),
    "H200": Rates(64, 128, 55e9),
    "B200": Rates(64, 128, 55e9),
}


class SecondOrder(NamedTuple):
    """Times over that of moving five tensors: the kernel with float64, with pairs of float32, and the copies."""

    by_float64: float
    by_pairs: float
    copies: float


def second_order(name: str, itemsize: int) -> SecondOrder:
    """Predicts the times of a large problem, which is read from memory twice."""
    gpu, rates = GPUS[name], RATES[name]
    tensor_s = itemsize / gpu.rate  # for each element
    cycles_per_s = gpu.traits.processors * gpu.hz

    def kernel_s(operations: int, rate: int) -> float:
        return max(3 * tensor_s, operations / rate / cycles_per_s) + 5 * tensor_s

    times = (
        kernel_s(_FLOAT64_OPERATIONS, rates.float64),
        kernel_s(_FLOAT32_OPERATIONS, rates.float32),
        3 * itemsize / rates.bus,  # three tensors in, while two go out
    )
    return SecondOrder(*(each / (5 * tensor_s) for each in times))


class Batch(NamedTuple):
    """The calls of a batch, and how many of them are launches."""

    calls: int
    launches: int


def batch(name: str) -> Batch:
    """Plans `REQUESTS` requests whose tensors lie side by side, as in a server's arena."""
    plans = [CopyPlan(pieces, GPUS[name].traits) for pieces in _chunks()]
    launches = sum(len(plan.launches) for plan in plans)
    copies = sum(1 + len(plan.copied_in) + len(plan.copied_out) + bool(plan.downloaded[1]) for plan in plans)
    return Batch(launches + copies, launches)


def copies_s(name: str) -> float:
    """The time of the batch's copies: two tensors in, while one goes out."""
    return 2 * REQUESTS * TENSOR.tensor_nbytes / RATES[name].bus


def planning_s() -> float:
    """The time in which this processor plans the batch, the shortest of some."""
    times = []
    for _ in range(_ROUNDS):
        chunks = _chunks()
        began = time.perf_counter()
        for pieces in chunks:
            CopyPlan(pieces, GPUS["H100"].traits)
        times.append(time.perf_counter() - began)
    return min(times)


def _chunks() -> list[list[Piece]]:
    problems = []
    for _ in range(REQUESTS):
        memory = np.zeros((3, *TENSOR.shape), np.float32)
        a, b, c, d, e = np.zeros((5, TENSOR.channels), np.float32)
        made = Problem(TENSOR, memory[0], memory[1], a, b, c, memory[2], d, e)
        problems.append(Piece(made, 0, TENSOR.channels))
    each = max(1, CHUNK_NBYTES // (3 * TENSOR.tensor_nbytes))
    return [problems[first : first + each] for first in range(0, REQUESTS, each)]


def main() -> None:
    """Prints both tables."""
    print("second order in training, time / that of five tensors' traffic: float64, pairs of float32, copies")
    for name in GPUS:
        cells = [
            f"{kind} {made.by_float64:5.1f} {made.by_pairs:5.1f} {made.copies:6.1f}"
            for kind, made in (("16-bit", second_order(name, 2)), ("float32", second_order(name, 4)))
        ]
        print(f"{name:6}", *cells, sep="   ")
    print(f"\n{REQUESTS} requests of the first order, tensors of {TENSOR.tensor_nbytes / 1e6:.1f} MB: milliseconds")
    for name in GPUS:
        made = batch(name)
        print(
            f"{name:6}   copies {1e3 * copies_s(name):5.2f}   {made.calls} calls {1e3 * made.calls * CALL_S:5.2f}, "
            f"of these {made.launches} launches {1e3 * made.launches * CALL_S:5.3f}"
        )
    print(f"planned by this processor in {1e3 * planning_s():.1f} ms, while the batch before is computed")


if __name__ == "__main__":
    main()
