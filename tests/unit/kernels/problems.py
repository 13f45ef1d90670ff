"""Problems of random numbers, and what is asked of their outputs."""

from __future__ import annotations

import numpy as np

from bngrad_kernels import tolerances
from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, ReserveSpace2Kind, Spec

DTYPES = [FLOAT32, BFLOAT16, FLOAT16]
KINDS = list(ReserveSpace2Kind)


def problem(spec: Spec, seed: int = 0, has_scale: bool = True) -> Problem:
    """A problem of random numbers, whose outputs are all NaN."""
    rng = np.random.default_rng(seed)

    def stats(low: float, high: float) -> Array:
        return rng.uniform(low, high, spec.channels).astype(spec.stats_dtype)

    made = Problem.allocate(
        spec,
        rng.normal(0.1, 1, spec.shape).astype(spec.dtype),
        rng.normal(3, 2, spec.shape).astype(spec.dtype),
        stats(-2, 2) if has_scale else None,
        stats(2.5, 3.5),
        stats(3, 5) if spec.reserve_space_2_kind is ReserveSpace2Kind.VARIANCE else stats(0.4, 0.6),
    )
    for output in outputs(made):
        output.fill(np.nan)
    return made


def outputs(problem: Problem) -> tuple[Array, Array, Array]:
    return problem.x_backprop, problem.scale_backprop, problem.offset_backprop


def bits(problem: Problem) -> list[bytes]:
    return [output.tobytes() for output in outputs(problem)]


def assert_right(problem: Problem) -> None:
    scale = np.ones(problem.spec.channels) if problem.scale is None else problem.scale
    inputs = (problem.y_backprop, problem.x, scale, problem.reserve_space_1, problem.reserve_space_2)
    errors, bounds = tolerances.errors(problem.spec, inputs, outputs(problem)), tolerances.bounds(problem.spec)
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)
