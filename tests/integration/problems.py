"""Random inputs of the ops, and the float64 answers to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bngrad_kernels import reference
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, ReserveSpace2Kind, Spec

X_BACKPROP_BOUND = {FLOAT32: 2.4e-7, FLOAT16: 2**-11 + 2.4e-7, BFLOAT16: 2**-8 + 2.4e-7}
"""The largest error, relative to the largest value: 2.4e-7, and one rounding to a narrower type."""

SUM_BOUND = 1e-6
"""The largest error of scale_backprop and offset_backprop, relative to the sum of their terms' magnitudes."""


class Inputs(NamedTuple):
    """What the ops of TensorFlow take, in their order."""

    y_backprop: Array
    x: Array
    scale: Array
    reserve_space_1: Array
    reserve_space_2: Array


def random_inputs(spec: Spec, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)

    def stats(low: float, high: float) -> Array:
        return rng.uniform(low, high, spec.channels).astype(spec.stats_dtype)

    return Inputs(
        rng.normal(size=spec.shape).astype(spec.dtype),
        rng.normal(1, 2, size=spec.shape).astype(spec.dtype),
        stats(0.5, 2),
        stats(0.5, 1.5),
        stats(3, 5) if spec.reserve_space_2_kind is ReserveSpace2Kind.VARIANCE else stats(0.4, 0.6),
    )


def assert_gradients(spec: Spec, inputs: Inputs, outputs: tuple[Any, ...]) -> None:
    """Asserts that the first three outputs are the gradients, within the contract's bounds."""
    expected = reference.fused_batch_norm_grad(spec, *inputs)
    x_backprop, scale_backprop, offset_backprop = outputs[:3]
    assert (x_backprop.shape, x_backprop.dtype) == (spec.shape, spec.dtype)
    assert scale_backprop.shape == offset_backprop.shape == (spec.channels,)
    assert scale_backprop.dtype == offset_backprop.dtype == spec.stats_dtype

    def worst(ours: Array, theirs: Array, magnitude: Array) -> float:
        error = np.abs(ours.astype(np.float64) - theirs) / np.maximum(magnitude, np.finfo(np.float32).tiny)
        return float(error.max(initial=0))

    largest = np.abs(expected.x_backprop).max(initial=0)
    assert worst(x_backprop, expected.x_backprop, largest) <= X_BACKPROP_BOUND[spec.dtype]
    magnitudes = _sums_of_magnitudes(spec, inputs)
    rounding = 2**-8 if spec.stats_dtype == BFLOAT16 else 0
    assert worst(scale_backprop, expected.scale_backprop, magnitudes[0]) <= SUM_BOUND + rounding
    assert worst(offset_backprop, expected.offset_backprop, magnitudes[1]) <= SUM_BOUND + rounding


def _sums_of_magnitudes(spec: Spec, inputs: Inputs) -> tuple[Array, Array]:
    """The sums of |terms| of scale_backprop and of offset_backprop, per channel."""
    shape = [1] * len(spec.shape)
    shape[spec.channel_axis] = spec.channels
    xc = inputs.x.astype(np.float64) - inputs.reserve_space_1.astype(np.float64).reshape(shape)
    dy = inputs.y_backprop.astype(np.float64)
    # The reference of |dy| against |xc| about a zero mean sums just the magnitudes.
    zeros = np.zeros(spec.channels)
    sums = reference.fused_batch_norm_grad(spec, np.abs(dy), np.abs(xc), zeros, zeros, inputs.reserve_space_2)
    return sums.scale_backprop, sums.offset_backprop
