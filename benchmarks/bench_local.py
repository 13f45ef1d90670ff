"""What a call of ``bngrad.Client("local:")`` costs beside its kernel: the two take turns on the same tensors."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
from benchmarks.kernels import cases

import bngrad
from bngrad_kernels.cpu import CpuBackend
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import Spec

SHAPES = {"4 KB": (1, 8, 8, 16), "100 KB": (4, 14, 14, 32), "1.6 MB": (8, 28, 28, 64), "25 MB": (32, 56, 56, 64)}
SECONDS = 2.0


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.bench_local", description=__doc__).parse_args()
    backend = CpuBackend()
    backend.warm_up()
    print(f"{backend.description}\n{'microseconds, median (best)':28}{'local:':>20}{'kernel':>20}{'ratio':>8}")
    with bngrad.Client("local:") as client:
        for name, shape in SHAPES.items():
            made = _problem(Spec(np.dtype(np.float32), shape, 3))
            assert made.scale is not None
            inputs = (made.y_backprop, made.x, made.scale, made.reserve_space_1, made.reserve_space_2)
            call = functools.partial(client.fused_batch_norm_grad_v2, *inputs)
            ours, kernel = _times([call, functools.partial(backend.run, [made])])
            ratio = statistics.median(ours) / statistics.median(kernel)
            print(f"{name:28}{_shown(ours):>20}{_shown(kernel):>20}{ratio:8.2f}")


def _problem(spec: Spec) -> Problem:
    rng = np.random.default_rng(0)
    y_backprop, x = (cases.aligned_empty(spec.shape, spec.dtype) for _ in range(2))
    for tensor in (y_backprop, x):
        tensor[...] = rng.standard_normal(spec.shape, np.float32)
    return Problem.allocate(spec, y_backprop, x, *rng.uniform(0.5, 1.5, (3, spec.channels)).astype(np.float32))


def _times(runs: list[Callable[[], object]]) -> list[list[float]]:
    """The times of each, in microseconds; they take turns of ten calls."""
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for run, found in zip(runs, times, strict=True):
            run()
            for _ in range(10):
                start = time.perf_counter()
                run()
                found.append(1e6 * (time.perf_counter() - start))
    return times


def _shown(times: list[float]) -> str:
    return f"{statistics.median(times):.0f} ({min(times):.0f})"


if __name__ == "__main__":
    main()
