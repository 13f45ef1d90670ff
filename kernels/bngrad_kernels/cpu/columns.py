"""The columns kernel: sums down the columns of a matrix, see `plan`.

Memory is read in the order it lies in, as no core has enough misses in flight for anything else: two rows at a time,
whose sums go to a row of float32 in the first-level cache, and from there to float64 once a band.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from bngrad_kernels.cpu.groups import GAIN, MEAN, SHIFT, SLOPE, chains_of, sums_of, table, width
from bngrad_kernels.cpu.plan import LANES
from bngrad_kernels.cpu.simd import (
    add,
    fma,
    keep_head,
    load,
    load64,
    load_head,
    mul,
    prefetch,
    store,
    store64,
    store_head,
    stream,
    sub,
    widen64,
    zero,
    zero64,
)  # fmt: skip

_BAND = 16
"""Rows whose sums are in float32: 8 additions of pairs, hence an error below 11 * 2**-24 of the sum of moduli."""
_BLOCK = 1024
"""Columns taken at once: their tables fill half of a first-level cache."""
_AHEAD = 1024
"""Elements between what is read and what is asked for."""

_F32 = np.float32(0)


@njit(error_model="numpy")
def sums(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Sums a tile; in inference also writes its x_backprop."""
    into, chains = sums_of(p, slot, t + 1), chains_of(p, slot, t)
    for column in range(0, 2 * p.padded, LANES):
        store64(into, column, zero64())
        store(_F32, chains, column, zero())
    start, stop = _first_row(p, t), _first_row(p, t + 1)
    whole, columns = min(stop, _whole_rows(p)), width(p, g)
    for row in range(start, whole, _BAND):
        for column in range(0, columns, _BLOCK):
            _sum_band(tag, p, g, slot, t, row, min(_BAND, whole - row), column, min(_BLOCK, columns - column))
    if stop > whole:
        _sum_band(tag, p, g, slot, t, whole, 1, 0, p.last_columns)


@njit(error_model="numpy")
def apply(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Writes x_backprop of a tile."""
    start, stop = _first_row(p, t), _first_row(p, t + 1)
    whole, columns = min(stop, _whole_rows(p)), width(p, g)
    for band in range(start, whole, _BAND):
        for column in range(0, columns, _BLOCK):
            for row in range(band, min(whole, band + _BAND)):
                _apply_row(tag, p, slot, _index(p, g, row), column, min(_BLOCK, columns - column))
    if stop > whole:
        _apply_row(tag, p, slot, _index(p, g, whole), 0, p.last_columns)


@njit(error_model="numpy")
def _first_row(p: Any, t: int) -> int:
    return t * p.rows // p.tiles


@njit(error_model="numpy")
def _whole_rows(p: Any) -> int:
    return p.rows if p.last_columns == p.columns else p.rows - 1


@njit(error_model="numpy")
def _index(p: Any, g: int, row: int) -> int:
    """Where a group's part of a row begins."""
    return row * p.columns + g * p.group_channels * p.span


@njit(error_model="numpy")
def _sum_band(tag: Any, p: Any, g: int, slot: int, t: int, row: int, rows: int, first: int, columns: int) -> None:
    chains = chains_of(p, slot, t)
    for pair in range(row, row + rows - 1, 2):
        _sum_pair(tag, p, slot, chains, _index(p, g, pair), first, columns)
    if rows % 2:
        _sum_row(tag, p, slot, chains, _index(p, g, row + rows - 1), first, columns)
    into = sums_of(p, slot, t + 1)
    for column in range(first, first + columns, LANES):
        _flush(chains, into, column)
        _flush(chains, into, p.padded + column)


@njit(error_model="numpy")
def _flush(chains: int, into: int, column: int) -> None:
    store64(into, column, add(load64(into, column), widen64(load(_F32, chains, column))))
    store(_F32, chains, column, zero())


@njit(error_model="numpy")
def _sum_pair(tag: Any, p: Any, slot: int, chains: int, index: int, first: int, columns: int) -> None:
    y_backprop, x, mean, dy_sums, dy_xc_sums = p.y_backprop, p.x, table(p, slot, MEAN), chains, chains + 4 * p.padded
    upper, lower = index, index + p.columns
    for column in range(first, first + columns - LANES + 1, LANES):
        prefetch(tag, y_backprop, upper + column + _AHEAD)
        prefetch(tag, y_backprop, lower + column + _AHEAD)
        prefetch(tag, x, upper + column + _AHEAD)
        prefetch(tag, x, lower + column + _AHEAD)
        dy0, dy1 = load(tag, y_backprop, upper + column), load(tag, y_backprop, lower + column)
        mu = load(_F32, mean, column)
        xc0, xc1 = sub(load(tag, x, upper + column), mu), sub(load(tag, x, lower + column), mu)
        store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), add(dy0, dy1)))
        store(_F32, dy_xc_sums, column, add(load(_F32, dy_xc_sums, column), fma(dy1, xc1, mul(dy0, xc0))))
    if not p.is_training:
        _scale_row(tag, p, slot, upper, first, columns)
        _scale_row(tag, p, slot, lower, first, columns)
    if columns % LANES:
        _sum_tail(tag, p, slot, chains, upper, first + columns)
        _sum_tail(tag, p, slot, chains, lower, first + columns)


@njit(error_model="numpy")
def _sum_row(tag: Any, p: Any, slot: int, chains: int, index: int, first: int, columns: int) -> None:
    y_backprop, x, mean, dy_sums, dy_xc_sums = p.y_backprop, p.x, table(p, slot, MEAN), chains, chains + 4 * p.padded
    for column in range(first, first + columns - LANES + 1, LANES):
        dy, xc = load(tag, y_backprop, index + column), sub(load(tag, x, index + column), load(_F32, mean, column))
        store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), dy))
        store(_F32, dy_xc_sums, column, fma(dy, xc, load(_F32, dy_xc_sums, column)))
    if not p.is_training:
        _scale_row(tag, p, slot, index, first, columns)
    if columns % LANES:
        _sum_tail(tag, p, slot, chains, index, first + columns)


@njit(error_model="numpy")
def _sum_tail(tag: Any, p: Any, slot: int, chains: int, index: int, end: int) -> None:
    """Sums the last columns of a row, fewer than a vector."""
    count = end % LANES
    column = end - count
    dy = load_head(tag, p.y_backprop, index + column, count)
    # The lanes that are not there have to stay 0 whatever the mean is.
    xc = keep_head(sub(load_head(tag, p.x, index + column, count), load(_F32, table(p, slot, MEAN), column)), count)
    dy_sums, dy_xc_sums = chains, chains + 4 * p.padded
    store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), dy))
    store(_F32, dy_xc_sums, column, fma(dy, xc, load(_F32, dy_xc_sums, column)))


@njit(error_model="numpy")
def _scale_row(tag: Any, p: Any, slot: int, index: int, first: int, columns: int) -> None:
    """Writes x_backprop of a row in inference."""
    y_backprop, out, gain = p.y_backprop, p.x_backprop, table(p, slot, GAIN)
    for column in range(first, first + columns, LANES):
        count = first + columns - column
        dx = mul(load(_F32, gain, column), load_head(tag, y_backprop, index + column, count))
        store_head(tag, out, index + column, dx, count)


@njit(error_model="numpy")
def _apply_row(tag: Any, p: Any, slot: int, index: int, first: int, columns: int) -> None:
    y_backprop, x, out, streams = p.y_backprop, p.x, p.x_backprop, p.streams
    mean, gain, shift, slope = table(p, slot, MEAN), table(p, slot, GAIN), table(p, slot, SHIFT), table(p, slot, SLOPE)
    end = first + columns
    for column in range(first, end - LANES + 1, LANES):
        at = index + column
        prefetch(tag, y_backprop, at + _AHEAD)
        prefetch(tag, x, at + _AHEAD)
        dx = x_backprop(
            load(tag, y_backprop, at), load(tag, x, at),
            load(_F32, mean, column), load(_F32, gain, column), load(_F32, shift, column), load(_F32, slope, column),
        )  # fmt: skip
        if streams:
            stream(tag, out, at, dx)
        else:
            store(tag, out, at, dx)
    if end % LANES:
        column, count = end - end % LANES, end % LANES
        at = index + column
        dx = x_backprop(
            load_head(tag, y_backprop, at, count), load_head(tag, x, at, count),
            load(_F32, mean, column), load(_F32, gain, column), load(_F32, shift, column), load(_F32, slope, column),
        )  # fmt: skip
        store_head(tag, out, at, dx, count)


@njit(error_model="numpy")
def x_backprop(dy: Any, x: Any, mean: Any, gain: Any, shift: Any, slope: Any) -> Any:
    """The gradient of x from the coefficients of its channels."""
    return mul(gain, sub(sub(dy, shift), mul(sub(x, mean), slope)))
