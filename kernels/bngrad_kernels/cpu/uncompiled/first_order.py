"""The gradients of batch normalisation in NumPy, added up in the order of the compiled kernels, see `plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from bngrad_kernels.cpu.plan import BAND, LANES, STEP, STEPS, Geometry, geometry
from bngrad_kernels.cpu.uncompiled.arithmetic import Float32Array, Float64Array, add_in_order, fma, rounded
from bngrad_kernels.cpu.uncompiled.tiles import (
    column,
    over_columns,
    over_lanes,
    over_tiles,
    planes_of,
    rows_of,
)
from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.reference import rstd_of
from bngrad_kernels.spec import FLOAT32

_CHUNK = 1 << 16
"""About this many elements are computed at once: the second-level cache holds what that takes."""
_BLOCK = STEPS * STEP

_Sums: TypeAlias = tuple[Float64Array, Float64Array]
"""Of y_backprop, and of its products with x less the mean."""


def run(problem: Problem) -> None:
    """Writes the outputs of a problem."""
    spec = problem.spec
    channels = range(spec.channels) if problem.channels is None else problem.channels
    cut = geometry(spec, channels)
    elements = spec.elements_per_channel if cut.is_planes else BAND * cut.fold * spec.inner
    width = max(1, _CHUNK // max(elements, 1))
    with np.errstate(all="ignore"):  # numbers that are not finite are results like others
        for start in range(channels.start, channels.stop, width):
            _compute(problem, range(start, min(start + width, channels.stop)))


def _compute(problem: Problem, channels: range) -> None:
    spec, part, m = problem.spec, slice(channels.start, channels.stop), problem.spec.elements_per_channel
    y_backprop, x, x_backprop = (
        tensor.reshape(spec.outer, spec.channels, spec.inner)[:, part]
        for tensor in (problem.y_backprop, problem.x, problem.x_backprop)
    )
    mean = problem.reserve_space_1[part].astype(np.float32)
    rstd = rstd_of(spec, problem.reserve_space_2[part])
    gain = rstd if problem.scale is None else problem.scale[part].astype(np.float64) * rstd
    sum_dy, sum_dy_xc = _sums(geometry(spec, channels), y_backprop, x, column(mean))
    problem.scale_backprop[part] = rounded(rstd * sum_dy_xc if m else sum_dy, spec.stats_dtype)
    problem.offset_backprop[part] = rounded(sum_dy, spec.stats_dtype)
    gain32, shift, slope = (
        column(rounded(values, FLOAT32)) for values in (gain, sum_dy / m, rstd * rstd * (sum_dy_xc / m))
    )
    for rows, columns in _pieces(range(spec.outer), range(spec.inner), len(channels)):
        dy = y_backprop[rows, :, columns].astype(np.float32)
        if spec.is_training:
            xc = x[rows, :, columns].astype(np.float32) - column(mean)
            dy = (dy - shift) - xc * slope
        x_backprop[rows, :, columns] = (gain32 * dy).astype(spec.dtype)


def _pieces(rows: range, columns: range, channels: int, unit: int = 1) -> Iterator[tuple[slice, slice]]:
    """Cuts elements of (outer, channels, inner) into pieces of about a chunk, in whole units of inner ones."""
    width = max(1, min(len(columns), max(_CHUNK // channels // unit, 1) * unit))
    height = max(1, _CHUNK // (width * channels))
    for row in range(rows.start, rows.stop, height):
        for first in range(columns.start, columns.stop, width):
            yield slice(row, min(row + height, rows.stop)), slice(first, min(first + width, columns.stop))


def _sums(cut: Geometry, y_backprop: Array, x: Array, mean: Float32Array) -> _Sums:
    """The sums of tensors (outer, channels, inner), shape (channels,)."""
    of_tile = _tile_of_planes if cut.is_planes else _tile_of_columns
    tiles = [of_tile(cut, t, y_backprop, x, mean) for t in range(cut.tiles)]
    sum_dy, sum_dy_xc = (over_tiles(np.stack(sums)) for sums in zip(*tiles, strict=True))
    if not cut.is_planes:
        sum_dy, sum_dy_xc = over_columns(sum_dy), over_columns(sum_dy_xc)
    return sum_dy, sum_dy_xc


def _tile_of_planes(cut: Geometry, t: int, y_backprop: Array, x: Array, mean: Float32Array) -> _Sums:
    """The sums of a tile of planes, shape (channels,)."""
    sum_dy = sum_dy_xc = np.zeros((len(mean), LANES))
    for piece in _pieces(*planes_of(cut, t), len(mean), _BLOCK):
        dy = y_backprop[piece[0], :, piece[1]].astype(np.float32)
        xc = x[piece[0], :, piece[1]].astype(np.float32) - mean
        of_blocks = (_in_order_of_blocks(sums) for sums in _block_sums(dy, xc))
        sum_dy, sum_dy_xc = map(add_in_order, (sum_dy, sum_dy_xc), of_blocks)
    return over_lanes(sum_dy), over_lanes(sum_dy_xc)


def _block_sums(dy: Float32Array, xc: Float32Array) -> tuple[Float32Array, Float32Array]:
    """The sums of each block, of which the last may be incomplete, shape (planes, channels, blocks, lanes)."""
    count = dy.shape[-1]
    blocks = -(-count // _BLOCK)
    missing = [(0, 0), (0, 0), (0, blocks * _BLOCK - count)]
    dy, xc = (np.pad(values, missing).reshape(*dy.shape[:2], blocks, STEPS, -1, LANES) for values in (dy, xc))
    sum_dy = sum_dy_xc = np.zeros_like(dy[..., 0, :, :])
    for step in range(STEPS):
        sum_dy = sum_dy + dy[..., step, :, :]
        sum_dy_xc = fma(dy[..., step, :, :], xc[..., step, :, :], sum_dy_xc)
    is_rotated = -(-count % STEP // LANES) % 2 == 1
    return _over_accumulators(sum_dy, is_rotated), _over_accumulators(sum_dy_xc, is_rotated)


def _over_accumulators(sums: Float32Array, is_rotated: bool) -> Float32Array:
    """Adds the four accumulators; an odd number of vectors after the last whole step has rotated those of its block."""
    a, b, c, d = np.moveaxis(sums, -2, 0)
    total = (a + b) + (c + d)
    if is_rotated:
        total[..., -1, :] = ((b + c) + (d + a))[..., -1, :]
    return total


def _in_order_of_blocks(sums: Float32Array) -> Float32Array:
    """From (planes, channels, blocks, lanes) to (planes * blocks, channels, lanes)."""
    return sums.swapaxes(1, 2).reshape(-1, sums.shape[1], LANES)


def _tile_of_columns(cut: Geometry, t: int, y_backprop: Array, x: Array, mean: Float32Array) -> _Sums:
    """The sums of each column of a tile of rows, shape (fold, channels, inner)."""
    channels, inner = len(mean), cut.inner
    sum_dy, sum_dy_xc = np.zeros((2, cut.fold, channels, inner))
    rows = rows_of(cut, t)
    whole = min(rows.stop, cut.rows if cut.last_fold == cut.fold else cut.rows - 1)
    height = max(1, _CHUNK // max(BAND * sum_dy.size, 1)) * BAND
    for first in range(rows.start, whole, height):
        outer = slice(first * cut.fold, min(first + height, whole) * cut.fold)
        of_bands = _band_sums(y_backprop[outer], x[outer], mean, cut.fold)
        sum_dy, sum_dy_xc = map(add_in_order, (sum_dy, sum_dy_xc), of_bands)
    if rows.stop > whole:
        outer = slice(whole * cut.fold, cut.outer)
        of_row = _band_sums(y_backprop[outer], x[outer], mean, cut.last_fold)
        sum_dy[: cut.last_fold] += of_row[0][0]
        sum_dy_xc[: cut.last_fold] += of_row[1][0]
    return sum_dy, sum_dy_xc


def _band_sums(y_backprop: Array, x: Array, mean: Float32Array, fold: int) -> tuple[Float32Array, Float32Array]:
    """The sums of each band of rows, shape (bands, fold, channels, inner)."""
    dy, xc = y_backprop.astype(np.float32), x.astype(np.float32) - mean
    dy, xc = (values.reshape(-1, fold, *values.shape[1:]) for values in (dy, xc))
    rows = len(dy)
    even = rows // 2 * 2
    pairs = dy[0:even:2] + dy[1:even:2]
    products = fma(dy[1:even:2], xc[1:even:2], dy[0:even:2] * xc[0:even:2])
    sum_dy, sum_dy_xc = (np.zeros((-(-rows // BAND), *dy.shape[1:]), np.float32) for _ in range(2))
    for i in range(BAND // 2):
        for sums, terms in ((sum_dy, pairs[i :: BAND // 2]), (sum_dy_xc, products[i :: BAND // 2])):
            sums[: len(terms)] += terms
    if rows > even:
        sum_dy[-1] += dy[-1]
        sum_dy_xc[-1] = fma(dy[-1], xc[-1], sum_dy_xc[-1])
    return sum_dy, sum_dy_xc
