"""Problems of the second order of random numbers, and what is asked of their outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels import tolerances
from bngrad_kernels.backend import Backend
from bngrad_kernels.problem import Array, GradGradProblem
from bngrad_kernels.spec import FLOAT32, ReserveSpace2Kind, Spec


def second(shape: tuple[int, ...], dtype: Any = FLOAT32, **changes: Any) -> Spec:
    return Spec(dtype, shape, 1, order=2, **changes)


def problem(spec: Spec, seed: int = 0) -> GradGradProblem:
    """A problem of random numbers, whose outputs are all NaN."""
    rng = np.random.default_rng(seed)

    def stats(low: float, high: float) -> Array:
        return rng.uniform(low, high, spec.channels).astype(spec.stats_dtype)

    made = GradGradProblem.allocate(
        spec,
        rng.normal(-0.2, 1, spec.shape).astype(spec.dtype),
        stats(-2, 2),
        stats(-2, 2),
        rng.normal(0.1, 1, spec.shape).astype(spec.dtype),
        rng.normal(3, 2, spec.shape).astype(spec.dtype),
        stats(-2, 2),
        stats(2.5, 3.5),
        stats(3, 5) if spec.reserve_space_2_kind is ReserveSpace2Kind.VARIANCE else stats(0.4, 0.6),
    )
    for output in outputs(made):
        output.fill(np.nan)
    return made


def inputs(problem: GradGradProblem) -> tuple[Array, ...]:
    names = ("grad_x_backprop", "grad_scale_backprop", "grad_offset_backprop", "y_backprop", "x", "scale",
             "reserve_space_1", "reserve_space_2")  # fmt: skip
    return tuple(getattr(problem, name) for name in names)


def outputs(problem: GradGradProblem) -> tuple[Array, Array, Array]:
    return problem.grad_y_backprop, problem.grad_x, problem.grad_scale


def bits(problem: GradGradProblem) -> list[bytes]:
    return [output.tobytes() for output in outputs(problem)]


def assert_right(problem: GradGradProblem) -> None:
    errors = tolerances.grad_grad_errors(problem.spec, inputs(problem), outputs(problem))
    bounds = tolerances.grad_grad_bounds(problem.spec)
    assert all(error <= bound for error, bound in zip(errors, bounds, strict=True)), (errors, bounds)


def assert_stays_in_its_channel(backend: Backend, spec: Spec, name: str, place: int, poison: float) -> None:
    """What is not finite in a channel of an input makes its outputs so, and no bit of another channel's differ."""
    made, poisoned = problem(spec), problem(spec)
    getattr(poisoned, name)[place, 2, 0] = poison
    backend.run([made, poisoned])
    others = np.setdiff1d(np.arange(spec.channels), [2])
    for clean, dirty in zip(outputs(made), outputs(poisoned), strict=True):
        axis = clean.ndim // 2
        assert np.take(clean, others, axis).tobytes() == np.take(dirty, others, axis).tobytes()
    assert not all(np.isfinite(output).all() for output in outputs(poisoned))


def assert_does_not_read_x_for_its_gradient(backend: Backend) -> None:
    """In inference."""
    made, poisoned = (problem(second((40, 5, 9), is_training=False)) for _ in range(2))
    poisoned.x[7, 2, 0] = np.nan
    backend.run([made, poisoned])
    assert made.grad_x.tobytes() == poisoned.grad_x.tobytes()
    assert made.grad_scale.tobytes() == poisoned.grad_scale.tobytes()
