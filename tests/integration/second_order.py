"""Cases of the second-order op, and the bounds of its errors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bngrad_kernels import tolerances
from bngrad_kernels.problem import Array, GradGradProblem
from bngrad_kernels.spec import FLOAT32, Spec

CASES = {
    "NHWC": (4, 5, 6, 7),
    "NCHW": (4, 7, 9, 9),
    "NDHWC": (2, 3, 9, 9, 7),
    "NCDHW": (2, 7, 0, 5, 6),
    "NHWC large": (16, 33, 33, 24),
    "NCHW large": (8, 96, 40, 40),  # 4.7 MiB, which is split among workers
}


def spec_of(case: str, dtype: Any = FLOAT32, *, is_training: bool = True) -> Spec:
    shape = CASES[case]
    axis = len(shape) - 1 if case.split(maxsplit=1)[0].endswith("C") else 1
    return Spec(dtype, shape, axis, epsilon=0.01, is_training=is_training, order=2)


def arguments(case: str) -> dict[str, Any]:
    return {"data_format": case.split(maxsplit=1)[0], "epsilon": 0.01}


@functools.cache
def inputs_of(spec: Spec) -> dict[str, Any]:
    rng = np.random.default_rng(len(spec.shape))
    arrays = {name: rng.normal(0.5, 1, spec.shape).astype(spec.dtype) for name in GradGradProblem.large_inputs}
    return arrays | {
        name: rng.uniform(0.5, 2, spec.channels).astype(np.float32) for name in GradGradProblem.small_inputs
    }


def assert_within_bounds(spec: Spec, outputs: tuple[Array, ...]) -> None:
    names = ("grad_x_backprop", "grad_scale_backprop", "grad_offset_backprop", "y_backprop", "x", "scale",
             "reserve_space_1", "reserve_space_2")  # fmt: skip
    errors = tolerances.grad_grad_errors(spec, tuple(inputs_of(spec)[name] for name in names), outputs)
    assert all(error <= bound for error, bound in zip(errors, tolerances.grad_grad_bounds(spec), strict=True)), errors
