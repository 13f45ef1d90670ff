"""The columns kernel: sums down the columns of a matrix, see `plan`.

Memory is read in address order, since a core cannot have enough cache misses in flight for any other. Two rows are read
at a time; their sums go to a row of float32 in the first-level cache, and from there to float64 once per band.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels.cpu.channel_stats import (
    GAIN,
    MEAN,
    SHIFT,
    SLOPE,
    chains_of,
    channels,
    first_channel,
    sums_of,
    table,
)
from bngrad_kernels.cpu.linked import internal
from bngrad_kernels.cpu.plan import BLOCK, LANES, LINE
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
"""Rows that are summed in float32: 8 additions of pairs, hence an error below 11 * 2**-24 of the sum of moduli."""
_F32 = np.float32(0)


@internal
def sums(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Sums a tile; in inference, also writes its x_backprop."""
    into, chains = sums_of(p, slot, t + 1), chains_of(p, slot, t)
    for column in range(0, 2 * p.padded, LANES):
        store64(into, column, zero64())
        store(_F32, chains, column, zero())
    start, stop = first_row(p, t), first_row(p, t + 1)
    whole, columns = min(stop, whole_rows(p)), run_columns(p, g, p.fold)
    for row in range(start, whole, _BAND):
        for column in range(0, columns, BLOCK):
            _sum_band(tag, p, g, slot, t, row, min(_BAND, whole - row), p.runs, column, min(BLOCK, columns - column))
    if stop > whole:
        _sum_band(tag, p, g, slot, t, whole, 1, runs_of(p, p.last_fold), 0, run_columns(p, g, p.last_fold))


@internal
def apply(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Writes x_backprop of a tile."""
    start, stop = first_row(p, t), first_row(p, t + 1)
    whole, columns = min(stop, whole_rows(p)), run_columns(p, g, p.fold)
    for band in range(start, whole, _BAND):
        for column in range(0, columns, BLOCK):
            for row in range(band, min(whole, band + _BAND)):
                _apply_row(tag, p, slot, index_of(p, g, row), p.runs, column, min(BLOCK, columns - column))
    if stop > whole:
        runs, columns = runs_of(p, p.last_fold), run_columns(p, g, p.last_fold)
        _apply_row(tag, p, slot, index_of(p, g, whole), runs, 0, columns)


@internal
def first_row(p: Any, t: int) -> int:
    """The first row of a tile."""
    return t * p.rows // p.tiles


@internal
def whole_rows(p: Any) -> int:
    """The number of full rows; the last row may be shorter."""
    return p.rows if p.last_fold == p.fold else p.rows - 1


@internal
def runs_of(p: Any, fold: int) -> int:
    """The number of runs in a row of ``fold`` folds."""
    return min(p.runs, fold)


@internal
def run_columns(p: Any, g: int, fold: int) -> int:
    """The columns of each run in a row of ``fold`` folds."""
    return fold // max(runs_of(p, fold), 1) * channels(p, g) * p.span


@internal
def index_of(p: Any, g: int, row: int) -> int:
    """The index at which a group's part of a row begins."""
    return row * p.columns + first_channel(p, g) * p.span


@internal
def _gap(p: Any) -> int:
    """The distance of two runs in memory less their distance in the tables."""
    return p.channels * p.span - p.pitch


@internal
def _sum_band(
    tag: Any, p: Any, g: int, slot: int, t: int, row: int, rows: int, runs: int, first: int, columns: int
) -> None:
    """Sums a range of columns of each run over a band of rows."""
    chains = chains_of(p, slot, t)
    for pair in range(row, row + rows - 1, 2):
        _sum_pair(tag, p, slot, chains, index_of(p, g, pair), runs, first, columns)
    if rows % 2:
        _sum_row(tag, p, slot, chains, index_of(p, g, row + rows - 1), runs, first, columns)
    into = sums_of(p, slot, t + 1)
    for column in range(first, first + (runs - 1) * p.pitch + columns, LANES):
        _flush(chains, into, column)
        _flush(chains, into, p.padded + column)


@internal
def _flush(chains: int, into: int, column: int) -> None:
    store64(into, column, add(load64(into, column), widen64(load(_F32, chains, column))))
    store(_F32, chains, column, zero())


@internal
def _sum_pair(tag: Any, p: Any, slot: int, chains: int, index: int, runs: int, first: int, columns: int) -> None:
    y_backprop, x, ahead = p.y_backprop, p.x, p.ahead
    places = y_backprop, x, table(p, slot, MEAN), chains, chains + 4 * p.padded
    for run in range(runs):
        upper, start = index + run * _gap(p), run * p.pitch + first
        lower, stop = upper + p.columns, start + columns
        for column in range(start, stop - LINE + 1, LINE):
            prefetch(tag, y_backprop, upper + column + ahead)
            prefetch(tag, y_backprop, lower + column + ahead)
            prefetch(tag, x, upper + column + ahead)
            prefetch(tag, x, lower + column + ahead)
            _sum_columns(tag, places, upper, lower, column)
            _sum_columns(tag, places, upper, lower, column + LANES)
        if columns % LINE >= LANES:
            _sum_columns(tag, places, upper, lower, stop - columns % LINE)
        if columns % LANES:
            _sum_pair_tail(tag, p, slot, chains, upper, stop - columns % LANES, columns % LANES)
    if not p.is_training:
        _scale_row(tag, p, slot, index, runs, first, columns)
        _scale_row(tag, p, slot, index + p.columns, runs, first, columns)


@internal
def _sum_columns(tag: Any, places: Any, upper: int, lower: int, column: int) -> None:
    """Sums 16 columns of two rows."""
    y_backprop, x, mean, dy_sums, dy_xc_sums = places
    dy0, dy1 = load(tag, y_backprop, upper + column), load(tag, y_backprop, lower + column)
    mu = load(_F32, mean, column)
    xc0, xc1 = sub(load(tag, x, upper + column), mu), sub(load(tag, x, lower + column), mu)
    store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), add(dy0, dy1)))
    store(_F32, dy_xc_sums, column, add(load(_F32, dy_xc_sums, column), fma(dy1, xc1, mul(dy0, xc0))))


@internal
def _sum_row(tag: Any, p: Any, slot: int, chains: int, index: int, runs: int, first: int, columns: int) -> None:
    y_backprop, x, mean, dy_sums, dy_xc_sums = p.y_backprop, p.x, table(p, slot, MEAN), chains, chains + 4 * p.padded
    for run in range(runs):
        at, start = index + run * _gap(p), run * p.pitch + first
        for column in range(start, start + columns - LANES + 1, LANES):
            dy, xc = load(tag, y_backprop, at + column), sub(load(tag, x, at + column), load(_F32, mean, column))
            store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), dy))
            store(_F32, dy_xc_sums, column, fma(dy, xc, load(_F32, dy_xc_sums, column)))
        if columns % LANES:
            _sum_tail(tag, p, slot, chains, at, start + columns - columns % LANES, columns % LANES)
    if not p.is_training:
        _scale_row(tag, p, slot, index, runs, first, columns)


@internal
def _sum_pair_tail(tag: Any, p: Any, slot: int, chains: int, upper: int, column: int, count: int) -> None:
    """Sums the last columns of two rows, fewer than a vector, in the order of `_sum_pair`."""
    lower = upper + p.columns
    dy0 = load_head(tag, p.y_backprop, upper + column, count)
    dy1 = load_head(tag, p.y_backprop, lower + column, count)
    xc0, xc1 = _centred_head(tag, p, slot, upper, column, count), _centred_head(tag, p, slot, lower, column, count)
    dy_sums, dy_xc_sums = chains, chains + 4 * p.padded
    store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), add(dy0, dy1)))
    store(_F32, dy_xc_sums, column, add(load(_F32, dy_xc_sums, column), fma(dy1, xc1, mul(dy0, xc0))))


@internal
def _sum_tail(tag: Any, p: Any, slot: int, chains: int, index: int, column: int, count: int) -> None:
    """Sums the last columns of a row, fewer than a vector."""
    dy, xc = load_head(tag, p.y_backprop, index + column, count), _centred_head(tag, p, slot, index, column, count)
    dy_sums, dy_xc_sums = chains, chains + 4 * p.padded
    store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), dy))
    store(_F32, dy_xc_sums, column, fma(dy, xc, load(_F32, dy_xc_sums, column)))


@internal
def _centred_head(tag: Any, p: Any, slot: int, index: int, column: int, count: int) -> Any:
    """The first elements of x less their mean; the other lanes have to be 0, even if the mean is not finite."""
    return keep_head(sub(load_head(tag, p.x, index + column, count), load(_F32, table(p, slot, MEAN), column)), count)


@internal
def _scale_row(tag: Any, p: Any, slot: int, index: int, runs: int, first: int, columns: int) -> None:
    """Writes x_backprop of a row in inference."""
    y_backprop, out, gain, streams = p.y_backprop, p.x_backprop, table(p, slot, GAIN), p.streams
    for run in range(runs):
        at, start = index + run * _gap(p), run * p.pitch + first
        stop = start + columns
        for column in range(start, stop - LINE + 1, LINE):
            low = mul(load(_F32, gain, column), load(tag, y_backprop, at + column))
            high = mul(load(_F32, gain, column + LANES), load(tag, y_backprop, at + column + LANES))
            _write_line(tag, out, at + column, low, high, streams)
        for column in range(stop - columns % LINE, stop, LANES):
            count = stop - column
            dx = mul(load(_F32, gain, column), load_head(tag, y_backprop, at + column, count))
            store_head(tag, out, at + column, dx, count)


@internal
def _apply_row(tag: Any, p: Any, slot: int, index: int, runs: int, first: int, columns: int) -> None:
    y_backprop, x, out, ahead, streams = p.y_backprop, p.x, p.x_backprop, p.ahead, p.streams
    tables = table(p, slot, MEAN), table(p, slot, GAIN), table(p, slot, SHIFT), table(p, slot, SLOPE)
    for run in range(runs):
        at, start = index + run * _gap(p), run * p.pitch + first
        stop = start + columns
        for column in range(start, stop - LINE + 1, LINE):
            prefetch(tag, y_backprop, at + column + ahead)
            prefetch(tag, x, at + column + ahead)
            dy, xs = load(tag, y_backprop, at + column), load(tag, x, at + column)
            low = _gradients(dy, xs, tables, column)
            dy, xs = load(tag, y_backprop, at + column + LANES), load(tag, x, at + column + LANES)
            high = _gradients(dy, xs, tables, column + LANES)
            _write_line(tag, out, at + column, low, high, streams)
        for column in range(stop - columns % LINE, stop, LANES):
            count = stop - column
            dy, xs = load_head(tag, y_backprop, at + column, count), load_head(tag, x, at + column, count)
            store_head(tag, out, at + column, _gradients(dy, xs, tables, column), count)


@internal
def _write_line(tag: Any, address: int, index: int, low: Any, high: Any, streams: int) -> None:
    if streams:
        stream(tag, address, index, low, high)
    else:
        store(tag, address, index, low)
        store(tag, address, index + LANES, high)


@internal
def _gradients(dy: Any, x: Any, tables: Any, column: int) -> Any:
    mean, gain, shift, slope = tables
    return x_backprop(
        dy, x, load(_F32, mean, column), load(_F32, gain, column), load(_F32, shift, column), load(_F32, slope, column)
    )


@internal
def x_backprop(dy: Any, x: Any, mean: Any, gain: Any, shift: Any, slope: Any) -> Any:
    """The gradient of x from the coefficients of its channels."""
    return mul(gain, sub(sub(dy, shift), mul(sub(x, mean), slope)))
