"""The oracle: the gradients in NumPy float64, written as the formulae stand in the literature."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bngrad_kernels.problem import Array
from bngrad_kernels.spec import ReserveSpace2Kind, Spec

Float64Array = npt.NDArray[np.float64]


class Gradients(NamedTuple):
    """The gradients, in float64: x_backprop of x's shape, the other two of shape (C,)."""

    x_backprop: Float64Array
    scale_backprop: Float64Array
    offset_backprop: Float64Array


def fused_batch_norm_grad(
    spec: Spec, y_backprop: Array, x: Array, scale: Array | None, reserve_space_1: Array, reserve_space_2: Array
) -> Gradients:
    """The gradients of fused batch normalisation, from inputs of any float dtype.

    Ioffe and Szegedy, "Batch Normalization" (2015), section 3, with the mean and the variance used as given.
    """
    axes = tuple(axis for axis in range(len(spec.shape)) if axis != spec.channel_axis)
    dy = y_backprop.astype(np.float64)
    xc = x.astype(np.float64) - _per_channel(spec, reserve_space_1)
    rstd = _per_channel(spec, _rstd(spec, reserve_space_2))
    gamma = _per_channel(spec, np.ones(spec.channels) if scale is None else scale)

    sum_dy = dy.sum(axes, keepdims=True)
    sum_dy_xc = (dy * xc).sum(axes, keepdims=True)
    centred = dy
    if spec.is_training and dy.size:
        m = spec.elements_per_channel
        centred = dy - sum_dy / m - xc * rstd**2 * (sum_dy_xc / m)
    with np.errstate(invalid="ignore"):
        scale_backprop = rstd * sum_dy_xc if dy.size else sum_dy
        return Gradients(gamma * rstd * centred, scale_backprop.reshape(-1), sum_dy.reshape(-1))


def _rstd(spec: Spec, reserve_space_2: Array) -> Float64Array:
    values = reserve_space_2.astype(np.float64)
    if spec.reserve_space_2_kind is ReserveSpace2Kind.INVERSE_STD:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 / np.sqrt(values + spec.epsilon)


def _per_channel(spec: Spec, values: Array) -> Float64Array:
    """Shapes (C,) for broadcasting against x."""
    shape = [1] * len(spec.shape)
    shape[spec.channel_axis] = spec.channels
    return values.astype(np.float64).reshape(shape)
