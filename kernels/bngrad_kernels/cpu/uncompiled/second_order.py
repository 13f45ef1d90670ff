"""The gradients of the gradients in NumPy, see `bngrad_kernels.cpu.second_order`, which has the names and formulae."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bngrad_kernels.cpu.plan import FAR, LANES, Geometry, geometry
from bngrad_kernels.cpu.uncompiled.arithmetic import (
    Float32Array,
    Float64Array,
    add_in_order,
    add_products_in_order,
    fma,
    rounded,
)
from bngrad_kernels.cpu.uncompiled.tiles import (
    column,
    over_columns,
    over_lanes,
    over_tiles,
    planes_of,
    rows_of,
)
from bngrad_kernels.problem import Array, GradGradProblem
from bngrad_kernels.reference import rstd_of
from bngrad_kernels.spec import FLOAT32

_CHUNK = 1 << 18
"""About this many elements are computed at once."""


class _Inputs(NamedTuple):
    """Those of some channels: tensors (outer, channels, inner), of which u is grad_x_backprop, and vectors."""

    u: Float32Array
    dy: Float32Array
    x: Float32Array
    a: Float64Array
    b: Float64Array
    scale: Float64Array
    mean: Float64Array
    rstd: Float64Array


class _Sums(NamedTuple):
    """Of ``u``, ``dy``, ``xk = x - pivot`` and their products, for each channel."""

    u: Float64Array
    dy: Float64Array
    xk: Float64Array
    u_dy: Float64Array
    u_xk: Float64Array
    dy_xk: Float64Array
    xk_xk: Float64Array


def run(problem: GradGradProblem) -> None:
    """Writes the outputs of a problem."""
    spec = problem.spec
    channels = range(spec.channels) if problem.channels is None else problem.channels
    if not spec.elements_per_channel:
        problem.grad_scale[channels.start : channels.stop] = 0
        return
    width = max(1, _CHUNK // spec.elements_per_channel)
    compute = _in_training if spec.is_training else _in_inference
    with np.errstate(all="ignore"):  # numbers that are not finite are results like others
        for start in range(channels.start, channels.stop, width):
            chunk = range(start, min(start + width, channels.stop))
            part = slice(chunk.start, chunk.stop)
            outputs = compute(geometry(spec, chunk), _inputs(problem, part), spec.epsilon)
            _tensor(problem, "grad_y_backprop", part)[...] = outputs[0].astype(spec.dtype)
            _tensor(problem, "grad_x", part)[...] = outputs[1].astype(spec.dtype)
            problem.grad_scale[part] = rounded(outputs[2], spec.stats_dtype)


def _tensor(problem: GradGradProblem, name: str, part: slice) -> Array:
    array: Array = getattr(problem, name)
    spec = problem.spec
    return array.reshape(spec.outer, spec.channels, spec.inner)[:, part]


def _inputs(problem: GradGradProblem, part: slice) -> _Inputs:
    u, dy, x = (_tensor(problem, name, part).astype(np.float32) for name in problem.large_inputs)
    vectors: list[Array] = [getattr(problem, name)[part] for name in problem.small_inputs]
    a, b, scale, mean, reserve_space_2 = (vector.astype(np.float64) for vector in vectors)
    return _Inputs(u, dy, x, a, b, scale, mean, rstd_of(problem.spec, reserve_space_2))


def _in_inference(cut: Geometry, inputs: _Inputs, _: float) -> tuple[Float32Array, Float32Array, Float64Array]:
    u, dy, x, a, b, scale, mean, rstd = inputs
    xh = (x - _table(mean)) * _table(rstd)
    grad_y_backprop = fma(_table(scale * rstd), u, fma(_table(a), xh, _table(b)))
    products = _in_order(cut, np.multiply(u, dy, dtype=np.float64))
    u_dy = _over_all(cut, add_in_order(np.zeros(products.shape[1:]), products))
    return grad_y_backprop, _table(a * rstd) * dy, rstd * u_dy


def _in_training(cut: Geometry, inputs: _Inputs, epsilon: float) -> tuple[Float32Array, Float32Array, Float64Array]:
    u, dy, x, a, b, scale, _, _ = inputs
    m = float(cut.outer * cut.inner)
    pivot, sums = _pivot_and_sums(cut, inputs, m)
    distance = sums.xk / m
    variance = sums.xk_xk / m - distance * distance
    variance = np.where(variance < 0.0, 0.0, variance)  # from rounding; NaN has to remain
    rstd = 1.0 / np.sqrt(variance + epsilon)
    mean = pivot + distance
    u_mean, dy_mean = sums.u / m, sums.dy / m
    u_xh = rstd * (sums.u_xk / m - distance * u_mean)
    dy_xh = rstd * (sums.dy_xk / m - distance * dy_mean)
    u_p_dy = sums.u_dy / m - u_mean * dy_mean - u_xh * dy_xh
    gain = scale * rstd
    dy_by_xh = a - gain * u_xh
    x_by_dy, x_by_u = rstd * dy_by_xh, -gain * rstd * dy_xh
    x_by_xh = -(x_by_dy * dy_xh + x_by_u * u_xh + gain * rstd * u_p_dy)

    mean_rest = mean - _table(mean)[:, 0].astype(np.float64)
    xh = ((x - _table(mean)) - _table(mean_rest)) * _table(rstd)
    u, dy = u - _table(u_mean), dy - _table(dy_mean)
    grad_y_backprop = fma(_table(gain), u, fma(_table(dy_by_xh), xh, _table(b)))
    grad_x = fma(_table(x_by_dy), dy, fma(_table(x_by_u), u, _table(x_by_xh) * xh))
    return grad_y_backprop, grad_x, rstd * m * u_p_dy


def _pivot_and_sums(cut: Geometry, inputs: _Inputs, m: float) -> tuple[Float64Array, _Sums]:
    """Takes the sums again, from other pivots, where a pivot was far from the mean."""
    pivot = inputs.x[0, :, 0].astype(np.float64)
    sums = _sums(cut, inputs, pivot)
    distance = sums.xk / m
    is_far = distance * distance > FAR * (sums.xk_xk / m - distance * distance)
    if not is_far.any():
        return pivot, sums
    pivot = np.where(is_far, rounded(pivot + distance, FLOAT32).astype(np.float64), pivot)
    return pivot, _sums(cut, inputs, pivot)


def _sums(cut: Geometry, inputs: _Inputs, pivot: Float64Array) -> _Sums:
    xk = np.subtract(inputs.x, column(pivot), dtype=np.float64)
    u, dy, xk = (_in_order(cut, terms) for terms in (inputs.u.astype(np.float64), inputs.dy.astype(np.float64), xk))
    none = np.zeros(u.shape[1:])
    sums = [add_in_order(none, terms) for terms in (u, dy, xk, u * dy)]  # that product is exact
    sums += [add_products_in_order(none, *factors) for factors in ((u, xk), (dy, xk), (xk, xk))]
    return _Sums(*(_over_all(cut, each) for each in sums))


def _in_order(cut: Geometry, terms: Float64Array) -> Float64Array:
    """From (outer, channels, inner) to (steps, tiles, ...): a tile is summed step by step, and ends with zeros."""
    of_tile = _plane_steps if cut.is_planes else _row_steps
    steps = [of_tile(cut, tile, terms) for tile in range(cut.tiles)]
    found = np.zeros((max(map(len, steps)), cut.tiles, *steps[0].shape[1:]))
    for tile, each in enumerate(steps):
        found[: len(each), tile] = each
    return found


def _plane_steps(cut: Geometry, tile: int, terms: Float64Array) -> Float64Array:
    """The vectors of a tile of planes, one after the other, shape (steps, channels, lanes)."""
    planes, elements = planes_of(cut, tile)
    chosen = terms[planes.start : planes.stop, :, elements.start : elements.stop]
    chosen = np.pad(chosen, [(0, 0), (0, 0), (0, -len(elements) % LANES)])
    channels = chosen.shape[1]
    return chosen.reshape(len(planes), channels, -1, LANES).swapaxes(1, 2).reshape(-1, channels, LANES)


def _row_steps(cut: Geometry, tile: int, terms: Float64Array) -> Float64Array:
    """The rows of a tile, shape (steps, fold, channels, inner)."""
    rows = rows_of(cut, tile)
    chosen = terms[rows.start * cut.fold : rows.stop * cut.fold]
    chosen = np.pad(chosen, [(0, len(rows) * cut.fold - len(chosen)), (0, 0), (0, 0)])
    return chosen.reshape(len(rows), cut.fold, *chosen.shape[1:])


def _over_all(cut: Geometry, sums: Float64Array) -> Float64Array:
    """The sums of channels from those of (tiles, ...)."""
    return over_tiles(over_lanes(sums)) if cut.is_planes else over_columns(over_tiles(sums))


def _table(per_channel: Float64Array) -> Array:
    """Coefficients in float32, shape (channels, 1)."""
    return column(rounded(per_channel, FLOAT32))
