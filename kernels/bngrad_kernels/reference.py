"""The reference: the gradients in NumPy float64, written as the formulae in the literature."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bngrad_kernels.problem import Array
from bngrad_kernels.spec import ReserveSpace2Kind, Spec

Float64Array = npt.NDArray[np.float64]


class ReferenceGradients(NamedTuple):
    """The gradients in float64: x_backprop of the shape of x, the other two of shape (C,)."""

    x_backprop: Float64Array
    scale_backprop: Float64Array
    offset_backprop: Float64Array


def fused_batch_norm_grad(
    spec: Spec, y_backprop: Array, x: Array, scale: Array | None, reserve_space_1: Array, reserve_space_2: Array
) -> ReferenceGradients:
    """Computes the gradients of fused batch normalisation, from inputs of any float dtype.

    Ioffe and Szegedy, "Batch Normalization" (2015), section 3, with the mean and the variance used as given.
    """
    axes = tuple(axis for axis in range(len(spec.shape)) if axis != spec.channel_axis)
    dy = y_backprop.astype(np.float64)
    xc = x.astype(np.float64) - per_channel(spec, reserve_space_1)
    rstd = per_channel(spec, rstd_of(spec, reserve_space_2))
    gamma = per_channel(spec, np.ones(spec.channels) if scale is None else scale)

    sum_dy = dy.sum(axes, keepdims=True)
    sum_dy_xc = (dy * xc).sum(axes, keepdims=True)
    centred = dy
    if spec.is_training and dy.size:
        m = spec.elements_per_channel
        centred = dy - sum_dy / m - xc * rstd**2 * (sum_dy_xc / m)
    with np.errstate(invalid="ignore"):
        scale_backprop = rstd * sum_dy_xc if dy.size else sum_dy
        return ReferenceGradients(gamma * rstd * centred, scale_backprop.reshape(-1), sum_dy.reshape(-1))


class ReferenceGradGrads(NamedTuple):
    """The second-order gradients in float64: the first two of the shape of x, grad_scale of shape (C,)."""

    grad_y_backprop: Float64Array
    grad_x: Float64Array
    grad_scale: Float64Array


def fused_batch_norm_grad_grad(
    spec: Spec,
    grad_x_backprop: Array,
    grad_scale_backprop: Array,
    grad_offset_backprop: Array,
    y_backprop: Array,
    x: Array,
    scale: Array,
    reserve_space_1: Array,
    reserve_space_2: Array,
) -> ReferenceGradGrads:
    """Computes the gradients of `fused_batch_norm_grad`; in training, mean and variance are functions of x.

    In training x_backprop is ``scale * rstd * P(y_backprop)`` with ``P(v) = v - mean(v) - xh * mean(v * xh)``. P is
    symmetric, so the gradient of y_backprop is that of x_backprop through the same P. The gradient of x follows from
    ``d xh = rstd * P(d x)`` and ``d rstd = -rstd**2 * mean(xh * d x)``. Without elements, grad_scale is zeros.
    """
    axes = tuple(axis for axis in range(len(spec.shape)) if axis != spec.channel_axis)
    dy, dx_grad = y_backprop.astype(np.float64), grad_x_backprop.astype(np.float64)
    a, b = per_channel(spec, grad_scale_backprop), per_channel(spec, grad_offset_backprop)
    gamma = per_channel(spec, scale)

    def mean(values: Float64Array) -> Float64Array:
        return np.asarray(values.mean(axes, keepdims=True))

    if not dy.size:
        return ReferenceGradGrads(dy, dy, np.zeros(spec.channels))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if not spec.is_training:
            rstd = per_channel(spec, rstd_of(spec, reserve_space_2))
            xh = (x.astype(np.float64) - per_channel(spec, reserve_space_1)) * rstd
            grad_scale = rstd * (dx_grad * dy).sum(axes, keepdims=True)
            return ReferenceGradGrads(gamma * rstd * dx_grad + a * xh + b, a * rstd * dy, grad_scale.reshape(-1))

        xc = x.astype(np.float64) - mean(x.astype(np.float64))
        rstd = 1 / np.sqrt(mean(xc**2) + spec.epsilon)
        xh = xc * rstd

        def project(values: Float64Array) -> Float64Array:
            return values - mean(values) - xh * mean(values * xh)

        p_dy, p_dx_grad = project(dy), project(dx_grad)
        return ReferenceGradGrads(
            gamma * rstd * p_dx_grad + a * xh + b,
            a * rstd * p_dy
            - gamma * rstd**2 * (xh * mean(dx_grad * p_dy) + mean(dx_grad * xh) * p_dy + mean(dy * xh) * p_dx_grad),
            (rstd * (dx_grad * p_dy).sum(axes, keepdims=True)).reshape(-1),
        )


def rstd_of(spec: Spec, reserve_space_2: Array) -> Float64Array:
    """The inverse standard deviation, shape (C,), from whatever kind reserve_space_2 holds."""
    values = reserve_space_2.astype(np.float64)
    if spec.reserve_space_2_kind is ReserveSpace2Kind.INVERSE_STD:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        return 1 / np.sqrt(values + spec.epsilon)


def per_channel(spec: Spec, values: Array) -> Float64Array:
    """Reshapes (C,) so that it broadcasts against x."""
    shape = [1] * len(spec.shape)
    shape[spec.channel_axis] = spec.channels
    return values.astype(np.float64).reshape(shape)
