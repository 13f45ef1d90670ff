"""Problems of random numbers of either order, and checks of their outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bngrad_kernels import tolerances
from bngrad_kernels.problem import AnyProblem, Array, GradGradProblem, Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, ReserveSpace2Kind, Spec

DTYPES = [FLOAT32, BFLOAT16, FLOAT16]
KINDS = list(ReserveSpace2Kind)
ORDERS = [1, 2]
MODES = [True, False]
"""Values of ``is_training``."""


def spec_of(order: int, shape: tuple[int, ...], dtype: Any = FLOAT32, **changes: Any) -> Spec:
    """A spec with the channels in dimension 1."""
    return Spec(dtype, shape, 1, order=order, **changes)


def random_problem(spec: Spec, seed: int = 0, *, has_scale: bool = True) -> AnyProblem:
    """A problem of random numbers, of the spec's order, whose outputs are all NaN."""
    return second_order_problem(spec, seed) if spec.order == 2 else first_order_problem(spec, seed, has_scale=has_scale)


def first_order_problem(spec: Spec, seed: int = 0, *, has_scale: bool = True) -> Problem:
    rng = np.random.default_rng(seed)
    made = Problem.allocate(
        spec,
        rng.normal(0.1, 1, spec.shape).astype(spec.dtype),
        rng.normal(3, 2, spec.shape).astype(spec.dtype),
        _stats(rng, spec, -2, 2) if has_scale else None,
        _stats(rng, spec, 2.5, 3.5),
        _reserve_space_2(rng, spec),
    )
    clear_outputs(made)
    return made


def second_order_problem(spec: Spec, seed: int = 0) -> GradGradProblem:
    rng = np.random.default_rng(seed)
    made = GradGradProblem.allocate(
        spec,
        rng.normal(-0.2, 1, spec.shape).astype(spec.dtype),
        _stats(rng, spec, -2, 2),
        _stats(rng, spec, -2, 2),
        rng.normal(0.1, 1, spec.shape).astype(spec.dtype),
        rng.normal(3, 2, spec.shape).astype(spec.dtype),
        _stats(rng, spec, -2, 2),
        _stats(rng, spec, 2.5, 3.5),
        _reserve_space_2(rng, spec),
    )
    clear_outputs(made)
    return made


def _stats(rng: np.random.Generator, spec: Spec, low: float, high: float) -> Array:
    return rng.uniform(low, high, spec.channels).astype(spec.stats_dtype)


def _reserve_space_2(rng: np.random.Generator, spec: Spec) -> Array:
    is_variance = spec.reserve_space_2_kind is ReserveSpace2Kind.VARIANCE
    return _stats(rng, spec, 3, 5) if is_variance else _stats(rng, spec, 0.4, 0.6)


def input_names(problem: AnyProblem) -> tuple[str, ...]:
    """The names of the inputs that the problem has, in the order of its fields."""
    names = (*problem.large_inputs, *problem.small_inputs)
    fields = (field.name for field in dataclasses.fields(problem))
    return tuple(name for name in fields if name in names and getattr(problem, name) is not None)


def output_names(problem: AnyProblem) -> tuple[str, ...]:
    return (*problem.large_outputs, *problem.small_outputs)


def outputs(problem: AnyProblem) -> tuple[Array, ...]:
    return tuple(getattr(problem, name) for name in output_names(problem))


def small_outputs(problem: AnyProblem) -> tuple[Array, ...]:
    return tuple(getattr(problem, name) for name in problem.small_outputs)


def clear_outputs(problem: AnyProblem) -> None:
    for output in outputs(problem):
        output.fill(np.nan)


def bits(problem: AnyProblem) -> list[bytes]:
    return [output.tobytes() for output in outputs(problem)]


def bits_of_channels(output: Array, channels: Any) -> bytes:
    """The bits of some channels of an output: of dimension 1 of a tensor, or of a vector."""
    chosen: Array = np.take(output, channels, output.ndim // 2)
    return chosen.tobytes()


def assert_right(*problems: AnyProblem) -> None:
    """Asserts that the errors of the problems' outputs are within their bounds."""
    errors: tuple[float, ...]
    bounds: tuple[float, ...]
    for problem in problems:
        if isinstance(problem, GradGradProblem):
            inputs = tuple(getattr(problem, name) for name in input_names(problem))
            errors = tolerances.grad_grad_errors(problem.spec, inputs, outputs(problem))
            bounds = tolerances.grad_grad_bounds(problem.spec)
        else:
            scale = np.ones(problem.spec.channels) if problem.scale is None else problem.scale
            inputs = (problem.y_backprop, problem.x, scale, problem.reserve_space_1, problem.reserve_space_2)
            errors, bounds = tolerances.errors(problem.spec, inputs, outputs(problem)), tolerances.bounds(problem.spec)
        assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)
