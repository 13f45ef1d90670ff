"""The columns kernel: sums down the columns of a matrix, see `plan`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from bngrad_kernels.cpu.groups import GAIN, MEAN, SHIFT, SLOPE, sums_of, table, width
from bngrad_kernels.cpu.plan import BLOCK, CHAIN, LANES
from bngrad_kernels.cpu.simd import (
    add,
    fma,
    keep_head,
    load,
    load64,
    load_head,
    mul,
    store,
    store64,
    store_head,
    stream,
    sub,
    widen64,
    zero,
    zero64,
)  # fmt: skip

_F32 = np.float32(0)


@njit(error_model="numpy")
def sums(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Sums a tile; in inference also writes its x_backprop."""
    into = sums_of(p, slot, t + 1)
    for column in range(0, 2 * p.padded, LANES):
        store64(into, column, zero64())
    start, stop = _first_row(p, t), _first_row(p, t + 1)
    whole = _whole_rows(p)
    for row in range(start, min(stop, whole), CHAIN):
        _sum_rows(tag, p, g, slot, into, row, min(CHAIN, min(stop, whole) - row), width(p, g))
    if stop > whole:
        _sum_rows(tag, p, g, slot, into, whole, 1, p.last_columns)


@njit(error_model="numpy")
def apply(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Writes x_backprop of a tile, last row first: what the sums read last is still in the cache."""
    start, stop = _first_row(p, t), _first_row(p, t + 1)
    whole = _whole_rows(p)
    if stop > whole:
        _apply_rows(tag, p, g, slot, whole, 1, p.last_columns)
        stop = whole
    while stop > start:
        row = max(start, stop - CHAIN)
        _apply_rows(tag, p, g, slot, row, stop - row, width(p, g))
        stop = row


@njit(error_model="numpy")
def _first_row(p: Any, t: int) -> int:
    return t * p.rows // p.tiles


@njit(error_model="numpy")
def _whole_rows(p: Any) -> int:
    return p.rows if p.last_columns == p.columns else p.rows - 1


@njit(error_model="numpy")
def _sum_rows(tag: Any, p: Any, g: int, slot: int, into: int, row: int, rows: int, columns: int) -> None:
    base = row * p.columns + g * p.group_channels * p.span
    column = 0
    while column + BLOCK <= columns:
        if p.is_training:
            _sum_block(tag, p, slot, into, base + column, column, rows)
        else:
            for vector in range(column, column + BLOCK, LANES):
                _sum_vector(tag, p, slot, into, base + vector, vector, rows, LANES)
        column += BLOCK
    while column < columns:
        _sum_vector(tag, p, slot, into, base + column, column, rows, columns - column)
        column += LANES


@njit(error_model="numpy")
def _sum_block(tag: Any, p: Any, slot: int, into: int, index: int, column: int, rows: int) -> None:
    mean = table(p, slot, MEAN)
    mean0, mean1 = load(_F32, mean, column), load(_F32, mean, column + 16)
    mean2, mean3 = load(_F32, mean, column + 32), load(_F32, mean, column + 48)
    dy0 = dy1 = dy2 = dy3 = zero()
    dy_xc0 = dy_xc1 = dy_xc2 = dy_xc3 = zero()
    for _ in range(rows):
        g0, g1 = load(tag, p.y_backprop, index), load(tag, p.y_backprop, index + 16)
        g2, g3 = load(tag, p.y_backprop, index + 32), load(tag, p.y_backprop, index + 48)
        dy0, dy1, dy2, dy3 = add(dy0, g0), add(dy1, g1), add(dy2, g2), add(dy3, g3)
        dy_xc0 = fma(g0, sub(load(tag, p.x, index), mean0), dy_xc0)
        dy_xc1 = fma(g1, sub(load(tag, p.x, index + 16), mean1), dy_xc1)
        dy_xc2 = fma(g2, sub(load(tag, p.x, index + 32), mean2), dy_xc2)
        dy_xc3 = fma(g3, sub(load(tag, p.x, index + 48), mean3), dy_xc3)
        index += p.columns
    _add_to(into, column, dy0)
    _add_to(into, column + 16, dy1)
    _add_to(into, column + 32, dy2)
    _add_to(into, column + 48, dy3)
    _add_to(into, p.padded + column, dy_xc0)
    _add_to(into, p.padded + column + 16, dy_xc1)
    _add_to(into, p.padded + column + 32, dy_xc2)
    _add_to(into, p.padded + column + 48, dy_xc3)


@njit(error_model="numpy")
def _sum_vector(tag: Any, p: Any, slot: int, into: int, index: int, column: int, rows: int, count: int) -> None:
    mean = load(_F32, table(p, slot, MEAN), column)
    gain = load(_F32, table(p, slot, GAIN), column)
    dy_sum = dy_xc_sum = zero()
    for _ in range(rows):
        dy = load_head(tag, p.y_backprop, index, count)
        dy_sum = add(dy_sum, dy)
        # The lanes that are not there have to stay 0 whatever the mean is.
        xc = keep_head(sub(load_head(tag, p.x, index, count), mean), count)
        dy_xc_sum = fma(dy, xc, dy_xc_sum)
        if not p.is_training:
            store_head(tag, p.x_backprop, index, mul(gain, dy), count)
        index += p.columns
    _add_to(into, column, dy_sum)
    _add_to(into, p.padded + column, dy_xc_sum)


@njit(error_model="numpy")
def _add_to(sums: int, column: int, part: Any) -> None:
    store64(sums, column, add(load64(sums, column), widen64(part)))


@njit(error_model="numpy")
def _apply_rows(tag: Any, p: Any, g: int, slot: int, row: int, rows: int, columns: int) -> None:
    base = row * p.columns + g * p.group_channels * p.span
    column = 0
    while column + LANES <= columns:
        _apply_vector(tag, p, slot, base + column, column, rows)
        column += LANES
    if column < columns:
        _apply_head(tag, p, slot, base + column, column, rows, columns - column)


@njit(error_model="numpy")
def _apply_vector(tag: Any, p: Any, slot: int, index: int, column: int, rows: int) -> None:
    mean, gain = load(_F32, table(p, slot, MEAN), column), load(_F32, table(p, slot, GAIN), column)
    shift, slope = load(_F32, table(p, slot, SHIFT), column), load(_F32, table(p, slot, SLOPE), column)
    if p.streams:
        for _ in range(rows):
            dx = x_backprop(load(tag, p.y_backprop, index), load(tag, p.x, index), mean, gain, shift, slope)
            stream(tag, p.x_backprop, index, dx)
            index += p.columns
    else:
        for _ in range(rows):
            dx = x_backprop(load(tag, p.y_backprop, index), load(tag, p.x, index), mean, gain, shift, slope)
            store(tag, p.x_backprop, index, dx)
            index += p.columns


@njit(error_model="numpy")
def _apply_head(tag: Any, p: Any, slot: int, index: int, column: int, rows: int, count: int) -> None:
    mean, gain = load(_F32, table(p, slot, MEAN), column), load(_F32, table(p, slot, GAIN), column)
    shift, slope = load(_F32, table(p, slot, SHIFT), column), load(_F32, table(p, slot, SLOPE), column)
    for _ in range(rows):
        dy, x = load_head(tag, p.y_backprop, index, count), load_head(tag, p.x, index, count)
        store_head(tag, p.x_backprop, index, x_backprop(dy, x, mean, gain, shift, slope), count)
        index += p.columns


@njit(error_model="numpy")
def x_backprop(dy: Any, x: Any, mean: Any, gain: Any, shift: Any, slope: Any) -> Any:
    """The gradient of x from the coefficients of its channels."""
    return mul(gain, sub(sub(dy, shift), mul(sub(x, mean), slope)))
