"""Computes problems in parts of their channels, and compares them with the whole."""

from __future__ import annotations

import itertools

import numpy as np
from tests.kernels.problems import outputs

from bngrad_kernels import backends
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import Spec

BACKENDS = {threads: backends.create("cpu", threads=threads) for threads in (1, 2)}
POISON = 0xA5

SHAPES = [  # (outer, C, inner): folded rows with and without a short last one, long rows, small planes, long planes
    (33, 64, 1), (5000, 64, 1), (300, 128, 1), (4001, 6, 1), (203, 100, 1), (35, 1500, 1), (130, 2048, 1), (1, 40, 1),
    (300, 5, 3), (7, 100, 49), (32, 70, 49), (9, 13, 127), (1, 7, 129), (3, 9, 17), (9, 3, 196), (4, 5, 20_000),
]  # fmt: skip


def poisoned_problem(spec: Spec, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    tensors = [rng.normal(0.5, 2, spec.shape).astype(spec.dtype) for _ in range(2)]
    stats = [rng.uniform(0.5, 2, spec.channels).astype(spec.stats_dtype) for _ in range(3)]
    made = Problem.allocate(spec, tensors[0], tensors[1], *stats)
    memory = np.empty(spec.tensor_nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64  # large tensors are streamed past the caches if they are aligned
    made.x_backprop = memory[start : start + spec.tensor_nbytes].view(spec.dtype).reshape(spec.shape)
    for output in outputs(made):
        output.view(np.uint8)[...] = POISON
    return made


def part_of(problem: Problem, channels: range) -> Problem:
    """The same arrays, for some channels only."""
    return Problem(
        problem.spec, problem.y_backprop, problem.x, problem.scale, problem.reserve_space_1, problem.reserve_space_2,
        problem.x_backprop, problem.scale_backprop, problem.offset_backprop, channels=channels,
    )  # fmt: skip


def assert_parts_are_the_whole(spec: Spec, cuts: list[int], threads: int, seed: int = 0) -> None:
    """Computes a problem at once and part by part, and looks at every byte of the outputs after each part."""
    whole, pieces = poisoned_problem(spec, seed), poisoned_problem(spec, seed)
    BACKENDS[threads].run([whole])
    expected = [output.copy() for output in outputs(pieces)]
    bounds = sorted({0, *cuts, spec.channels})
    for first, last in itertools.pairwise(bounds):
        BACKENDS[threads].run([part_of(pieces, range(first, last))])
        for array, right in zip(expected, outputs(whole), strict=True):
            channels = (slice(None),) * (spec.channel_axis if array.ndim > 1 else 0) + (slice(first, last),)
            array[channels] = right[channels]
        assert [a.tobytes() for a in outputs(pieces)] == [a.tobytes() for a in expected], (first, last)
