"""The errors of results against the float64 reference, and the bounds on these errors."""

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
    """The largest errors of a result, or the bounds on them.

    Attributes:
        x_backprop: Relative to the largest sum of the moduli of an element's terms, which are those of y_backprop and
            its two means; if these cancel each other, as among a few elements, that is more than x_backprop itself.
        scale_backprop: Relative to the sum of the moduli of the terms, in the worst channel.
        offset_backprop: The same.
    """

    x_backprop: float
    scale_backprop: float
    offset_backprop: float


def bounds(spec: Spec) -> Errors:
    """The bounds: the error of the computation in float32, plus one rounding if the result has a narrower type."""
    sums = _SUM_BOUND + _rounding(spec.stats_dtype)
    return Errors(_X_BACKPROP_BOUND + _rounding(spec.dtype), sums, sums)


def errors(spec: Spec, inputs: tuple[Array, ...], outputs: tuple[Array, ...]) -> Errors:
    """Computes the errors of a result.

    Args:
        spec: What was computed.
        inputs: y_backprop, x, scale, reserve_space_1, reserve_space_2.
        outputs: x_backprop, scale_backprop, offset_backprop; further ones are ignored.
    """
    y_backprop, x, scale, reserve_space_1, reserve_space_2 = inputs
    exact = reference.fused_batch_norm_grad(spec, y_backprop, x, scale, reserve_space_1, reserve_space_2)
    # The gradients of |y_backprop| and |x - mean| about a mean of zero are the sums of the moduli.
    shape = [1] * len(spec.shape)
    shape[spec.channel_axis] = spec.channels
    xc = np.abs(x.astype(np.float64) - reserve_space_1.astype(np.float64).reshape(shape))
    zeros = np.zeros(spec.channels)
    moduli = reference.fused_batch_norm_grad(spec, np.abs(y_backprop), xc, zeros, zeros, reserve_space_2)
    scales = (_x_backprop_moduli(spec, inputs).max(initial=0), moduli.scale_backprop, moduli.offset_backprop)
    return Errors(*(_worst(*each) for each in zip(outputs, exact, scales, strict=False)))


def _x_backprop_moduli(spec: Spec, inputs: tuple[Array, ...]) -> npt.NDArray[np.float64]:
    """The sums of the moduli of the terms of x_backprop's elements."""
    axes = tuple(axis for axis in range(len(spec.shape)) if axis != spec.channel_axis)
    y_backprop, x, scale, reserve_space_1, reserve_space_2 = inputs
    dy = y_backprop.astype(np.float64)
    rstd = reference.per_channel(spec, reference.rstd_of(spec, reserve_space_2))
    terms = np.abs(dy)
    if spec.is_training and dy.size:
        xh = (x.astype(np.float64) - reference.per_channel(spec, reserve_space_1)) * rstd
        terms = terms + np.abs(dy.mean(axes, keepdims=True)) + np.abs(xh * (dy * xh).mean(axes, keepdims=True))
    return np.asarray(np.abs(reference.per_channel(spec, scale) * rstd) * terms)


class GradGradErrors(NamedTuple):
    """The largest errors of a second-order result, or the bounds on them, all relative to the moduli of the terms.

    The elements are computed from these terms::

        grad_y_backprop: scale * rstd * (u - mean(u)), (a - scale * rstd * mean(u * xh)) * xh, b
        grad_x:          c1 * (dy - mean(dy)), c2 * (u - mean(u)), c3 * xh
        grad_scale:      rstd * u * dy, and its projections

    where u, a and b are the gradients of x_backprop, scale_backprop and offset_backprop. The modulus of each mean
    counts as well as that of the difference. In inference there are no means.

    Attributes:
        grad_y_backprop: Relative to the sum of the moduli of the element's own terms, in the worst element.
        grad_x: The same.
        grad_scale: Relative to the sum of the moduli of the terms, in the worst channel.
    """

    grad_y_backprop: float
    grad_x: float
    grad_scale: float


def grad_grad_bounds(spec: Spec) -> GradGradErrors:
    """The bounds of the second order: a float32 rounding for each operation, plus one to a narrower type.

    Each coefficient is a float64, rounded once. ``xh = ((x - mean) - rest) * rstd`` has four roundings: of the two
    subtractions, the coefficient and the product. A term of xh adds those of its own coefficient and of at most three
    operations; a term of u or dy has fewer. That is at most eight roundings of 2**-24. grad_scale is float64 until its
    one rounding, and so are the sums. Their errors stay below 2**-30 of their terms for up to 2**30 elements per
    channel, since a pivot is at most 32 standard deviations from the mean.
    """
    half_ulp = float(np.finfo(np.float32).eps) / 2
    tensors = 8.1 * half_ulp + _rounding(spec.dtype)
    return GradGradErrors(tensors, tensors, 1.1 * half_ulp + _rounding(spec.stats_dtype))


def grad_grad_errors(spec: Spec, inputs: tuple[Array, ...], outputs: tuple[Array, ...]) -> GradGradErrors:
    """Computes the errors of a second-order result.

    Args:
        spec: What was computed.
        inputs: As `reference.fused_batch_norm_grad_grad` takes them.
        outputs: grad_y_backprop, grad_x, grad_scale.
    """
    exact = reference.fused_batch_norm_grad_grad(spec, *inputs)
    # Subnormal numbers have fewer bits; those of float32 are too small to matter.
    lost = 0.0 if spec.dtype == FLOAT32 else float(ml_dtypes.finfo(spec.dtype).smallest_subnormal) / 2  # type: ignore[no-untyped-call]
    worst = []
    for got, right, moduli in zip(outputs, exact, _grad_grad_moduli(spec, *inputs), strict=True):
        error = np.abs(got.astype(np.float64) - right)
        worst.append(_worst(np.maximum(error - lost, 0) if got.ndim > 1 else error, np.zeros(1), moduli))
    return GradGradErrors(*worst)


def _grad_grad_moduli(
    spec: Spec,
    grad_x_backprop: Array,
    grad_scale_backprop: Array,
    grad_offset_backprop: Array,
    y_backprop: Array,
    x: Array,
    scale: Array,
    reserve_space_1: Array,
    reserve_space_2: Array,
) -> tuple[npt.NDArray[np.float64], ...]:
    """The sums of the moduli of the terms of `GradGradErrors`."""
    axes = tuple(axis for axis in range(len(spec.shape)) if axis != spec.channel_axis)
    u, dy, x = (tensor.astype(np.float64) for tensor in (grad_x_backprop, y_backprop, x))
    vectors = (grad_scale_backprop, grad_offset_backprop, scale, reserve_space_1, reserve_space_2)
    a, b, gamma, mean, rstd = (reference.per_channel(spec, vector) for vector in vectors)
    if not spec.is_training or not x.size:
        rstd = reference.per_channel(spec, reference.rstd_of(spec, reserve_space_2))
        products = np.abs(rstd) * np.abs(u * dy).sum(axes, keepdims=True)
        grad_y = np.abs(gamma * rstd * u) + np.abs(a * (x - mean) * rstd) + np.abs(b)
        return grad_y, np.abs(a * rstd * dy), products.reshape(-1)

    def average(values: Array) -> npt.NDArray[np.float64]:
        return np.asarray(values.mean(axes, keepdims=True))

    xc = x - average(x)
    rstd = 1 / np.sqrt(average(xc**2) + spec.epsilon)
    xh = xc * rstd
    u_mean, dy_mean, u_xh, dy_xh = average(u), average(dy), average(u * xh), average(dy * xh)
    from_dy, from_u = a - gamma * rstd * u_xh, -gamma * rstd**2 * dy_xh
    from_xh = rstd * from_dy * dy_xh + from_u * u_xh
    from_xh += gamma * rstd**2 * (average(u * dy) - u_mean * dy_mean - u_xh * dy_xh)
    u_moduli, dy_moduli = np.abs(u - u_mean) + np.abs(u_mean), np.abs(dy - dy_mean) + np.abs(dy_mean)
    products = average(np.abs(u * dy)) + np.abs(u_mean * dy_mean) + np.abs(u_xh * dy_xh)
    return (
        np.abs(gamma * rstd) * u_moduli + np.abs(from_dy * xh) + np.abs(b),
        np.abs(rstd * from_dy) * dy_moduli + np.abs(from_u) * u_moduli + np.abs(from_xh * xh),
        (rstd * spec.elements_per_channel * products).reshape(-1),
    )


def _worst(got: Array, exact: npt.NDArray[np.float64], scale: npt.ArrayLike) -> float:
    error = np.abs(got.astype(np.float64) - exact) / np.maximum(scale, np.finfo(np.float32).tiny)
    return float(error.max(initial=0))


def _rounding(dtype: np.dtype[np.generic]) -> float:
    """The relative error of rounding to a dtype; 0 for float32, whose rounding the bounds already include."""
    return 0.0 if dtype == FLOAT32 else float(ml_dtypes.finfo(dtype).eps) / 2  # type: ignore[no-untyped-call]
