"""How far results are from the float64 reference, and how far they may be."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from bngrad_kernels import reference
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import FLOAT32, Spec

_X_BACKPROP_BOUND = 2.4e-7
_SUM_BOUND = 1e-6


class Errors(NamedTuple):
    """The largest errors of a result, or the bounds of them.

    Attributes:
        x_backprop: Relative to the largest modulus in x_backprop.
        scale_backprop: Relative to the sum of the moduli of the terms, the worst channel.
        offset_backprop: Alike.
    """

    x_backprop: float
    scale_backprop: float
    offset_backprop: float


def bounds(spec: Spec) -> Errors:
    """What is allowed: the float32 computation's error, and one rounding where the result is of a narrower type."""
    sums = _SUM_BOUND + _rounding(spec.stats_dtype)
    return Errors(_X_BACKPROP_BOUND + _rounding(spec.dtype), sums, sums)


def errors(spec: Spec, inputs: tuple[Array, ...], outputs: tuple[Array, ...]) -> Errors:
    """The errors of a result.

    Args:
        spec: What was computed.
        inputs: y_backprop, x, scale, reserve_space_1, reserve_space_2.
        outputs: x_backprop, scale_backprop, offset_backprop, and whatever follows them.
    """
    y_backprop, x, scale, reserve_space_1, reserve_space_2 = inputs
    exact = reference.fused_batch_norm_grad(spec, y_backprop, x, scale, reserve_space_1, reserve_space_2)
    # The gradients of |y_backprop| and |x - mean| about a mean of zero are the sums of the moduli.
    shape = [1] * len(spec.shape)
    shape[spec.channel_axis] = spec.channels
    xc = np.abs(x.astype(np.float64) - reserve_space_1.astype(np.float64).reshape(shape))
    zeros = np.zeros(spec.channels)
    moduli = reference.fused_batch_norm_grad(spec, np.abs(y_backprop), xc, zeros, zeros, reserve_space_2)
    largest = np.abs(exact.x_backprop).max(initial=0)
    scales = (largest, moduli.scale_backprop, moduli.offset_backprop)
    return Errors(*(_worst(*each) for each in zip(outputs, exact, scales, strict=False)))


def _worst(got: Array, exact: npt.NDArray[np.float64], scale: npt.ArrayLike) -> float:
    error = np.abs(got.astype(np.float64) - exact) / np.maximum(scale, np.finfo(np.float32).tiny)
    return float(error.max(initial=0))


def _rounding(dtype: np.dtype[np.generic]) -> float:
    """The relative error of rounding to a dtype; none for float32, whose rounding is in the bounds already."""
    return 0.0 if dtype == FLOAT32 else float(ml_dtypes.finfo(dtype).eps) / 2  # type: ignore[no-untyped-call]
