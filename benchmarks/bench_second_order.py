"""CPU time of the second order against PyTorch's double backward, on the batch-norm layers of ResNet-50.

Both compute the same numbers with the same number of threads, in turns. PyTorch's graph of the first order is built
before: only its gradient is timed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from benchmarks.kernels import cases
from benchmarks.peers.pytorch import channels_second, to_torch

from bngrad_kernels import backends
from bngrad_kernels.problem import GradGradProblem
from bngrad_kernels.spec import Spec


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_second_order", description=__doc__)
    parser.add_argument("--layout", nargs="+", choices=cases.LAYOUTS, default=cases.LAYOUTS)
    parser.add_argument("--dtype", nargs="+", choices=list(cases.DTYPES), default=["float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backend = backends.create("cpu", threads=options.threads)
    backend.warm_up()
    print(f"{'milliseconds, median':28}{'bngrad':>10}{'pytorch':>10}{'ratio':>8}{'GB/s':>8}")
    ratios = []
    for layout in options.layout:
        for dtype in options.dtype:
            for chw in cases.RESNET50:
                case = cases.Case(layout, dtype, chw)
                made = _problem(case.spec)
                ours, theirs = _medians([functools.partial(backend.run, [made]), _pytorch(made)], options.rounds)
                gigabytes = 5 * made.spec.tensor_nbytes / 1e9
                ratios.append(ours / theirs)
                print(f"{case!s:28}{1e3 * ours:10.2f}{1e3 * theirs:10.2f}{ratios[-1]:8.2f}{gigabytes / ours:8.1f}")
    print(f"geometric mean of the ratios: {statistics.geometric_mean(ratios):.2f}")


def _problem(first_order: Spec) -> GradGradProblem:
    spec = Spec(first_order.dtype, first_order.shape, first_order.channel_axis, order=2)
    rng = np.random.default_rng(0)
    tensors = [cases.aligned_empty(spec.shape, spec.dtype) for _ in range(5)]
    for tensor in tensors[:3]:
        tensor[...] = rng.standard_normal(spec.shape, np.float32)
    a, b, scale, mean, variance, grad_scale = rng.uniform(0.5, 1.5, (6, spec.channels)).astype(np.float32)
    u, dy, x, grad_y, grad_x = tensors
    return GradGradProblem(spec, u, a, b, dy, x, scale, mean, variance, grad_y, grad_x, grad_scale)


def _pytorch(made: GradGradProblem) -> Callable[[], object]:
    spec = made.spec
    u, dy, x = (channels_second(spec, to_torch(t)) for t in (made.grad_x_backprop, made.y_backprop, made.x))
    a, b, scale = (to_torch(vector) for vector in (made.grad_scale_backprop, made.grad_offset_backprop, made.scale))
    inputs = (dy.requires_grad_(), x.requires_grad_(), scale.requires_grad_())
    offset = torch.zeros_like(scale).requires_grad_()
    y = torch.nn.functional.batch_norm(x, None, None, scale, offset, training=True, eps=spec.epsilon)
    first = torch.autograd.grad(y, (x, scale, offset), dy, create_graph=True)
    return lambda: torch.autograd.grad(first, inputs, (u, a, b), retain_graph=True)


def _medians(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """The median time of each, in seconds; they take turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(rounds):
        for run, times in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


if __name__ == "__main__":
    main()
