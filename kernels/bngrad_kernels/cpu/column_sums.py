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
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import BLOCK, LANES, LINE
from bngrad_kernels.cpu.simd import (
    add,
    fma,
    from_line_order,
    in_line_order,
    is_rearranged,
    keep_head,
    load,
    load_head,
    load_line,
    mul,
    prefetch,
    store,
    store_head,
    store_line,
    stream_line,
    sub,
    zero,
)  # fmt: skip
from bngrad_kernels.cpu.simd64 import load64, store64, widen64, zero64

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
    _arrange(tag, p, g, table(p, slot, MEAN), _line_means(tag, p, slot, t))
    for row in range(start, whole, _BAND):
        for column in range(0, columns, BLOCK):
            _sum_band(tag, p, g, slot, t, row, min(_BAND, whole - row), p.runs, column, min(BLOCK, columns - column))
    if stop > whole:
        _sum_band(tag, p, g, slot, t, whole, 1, runs_of(p, p.last_fold), 0, run_columns(p, g, p.last_fold))


@internal
def apply(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Writes x_backprop of a tile."""
    for which in range(4):
        _arrange(tag, p, g, table(p, slot, which), _line_table(tag, p, slot, t, which))
    start, stop = first_row(p, t), first_row(p, t + 1)
    whole, columns = min(stop, whole_rows(p)), run_columns(p, g, p.fold)
    for band in range(start, whole, _BAND):
        for column in range(0, columns, BLOCK):
            for row in range(band, min(whole, band + _BAND)):
                _apply_row(tag, p, slot, t, index_of(p, g, row), p.runs, column, min(BLOCK, columns - column))
    if stop > whole:
        runs, columns = runs_of(p, p.last_fold), run_columns(p, g, p.last_fold)
        _apply_row(tag, p, slot, t, index_of(p, g, whole), runs, 0, columns)


@internal
def _line_means(tag: Any, p: Any, slot: int, t: int) -> int:
    """The address of the means for whole lines, in their order."""
    return chains_of(p, slot, t) + 2 * p.padded * 4 if is_rearranged(tag) else table(p, slot, MEAN)


@internal
def _line_table(tag: Any, p: Any, slot: int, t: int, which: int) -> int:
    """The address of a table for whole lines, in their order; it takes the place of sums that are no longer needed."""
    return sums_of(p, slot, t + 1) + which * p.padded * 4 if is_rearranged(tag) else table(p, slot, which)


@internal
def _arrange(tag: Any, p: Any, g: int, source: int, target: int) -> None:
    """Copies a table, in the order of lines."""
    if is_rearranged(tag):
        columns = run_columns(p, g, p.fold)
        for run in range(p.runs):
            start = run * p.pitch
            for column in range(start, start + columns - LINE + 1, LINE):
                first, second = in_line_order(tag, load(_F32, source, column), load(_F32, source, column + LANES))
                store(_F32, target, column, first)
                store(_F32, target, column + LANES, second)


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
        _sum_pair(tag, p, slot, t, index_of(p, g, pair), runs, first, columns)
    if rows % 2:
        _sum_row(tag, p, slot, t, index_of(p, g, row + rows - 1), runs, first, columns)
    into = sums_of(p, slot, t + 1)
    for run in range(runs):
        start = run * p.pitch + first
        _flush(tag, chains, into, start, columns)
        _flush(tag, chains, into, p.padded + start, columns)


@internal
def _flush(tag: Any, chains: int, into: int, start: int, columns: int) -> None:
    stop = start + columns
    for column in range(start, stop - LINE + 1, LINE):
        low, high = from_line_order(tag, load(_F32, chains, column), load(_F32, chains, column + LANES))
        _add_to(into, column, low)
        _add_to(into, column + LANES, high)
        store(_F32, chains, column, zero())
        store(_F32, chains, column + LANES, zero())
    for column in range(stop - columns % LINE, stop, LANES):
        _add_to(into, column, load(_F32, chains, column))
        store(_F32, chains, column, zero())


@internal
def _add_to(sums: int, column: int, value: Any) -> None:
    store64(sums, column, add(load64(sums, column), widen64(value)))


@internal
def _sum_pair(tag: Any, p: Any, slot: int, t: int, index: int, runs: int, first: int, columns: int) -> None:
    y_backprop, x, chains = p.y_backprop, p.x, chains_of(p, slot, t)
    places = _line_means(tag, p, slot, t), chains, chains + 4 * p.padded
    for run in range(runs):
        upper, start = index + run * _gap(p), run * p.pitch + first
        lower, stop = upper + p.columns, start + columns
        later = upper + start + p.ahead  # a pair of rows, prefetched in the order of addresses: first its upper row
        for column in range(start, stop - LINE + 1, LINE):
            place = 2 * (column - start)
            if place >= columns:
                place += p.columns - columns
            prefetch(tag, y_backprop, later + place)
            prefetch(tag, y_backprop, later + place + LINE)
            prefetch(tag, x, later + place)
            prefetch(tag, x, later + place + LINE)
            upper_dy, upper_x = load_line(tag, y_backprop, upper + column), load_line(tag, x, upper + column)
            lower_dy, lower_x = load_line(tag, y_backprop, lower + column), load_line(tag, x, lower + column)
            _add_pair(places, column, upper_dy[0], lower_dy[0], upper_x[0], lower_x[0])
            _add_pair(places, column + LANES, upper_dy[1], lower_dy[1], upper_x[1], lower_x[1])
        for column in range(stop - columns % LINE, stop, LANES):
            _sum_pair_head(tag, p, slot, chains, upper, column, stop - column)
    if not p.is_training:
        _scale_row(tag, p, slot, index, runs, first, columns)
        _scale_row(tag, p, slot, index + p.columns, runs, first, columns)


@internal
def _add_pair(places: Any, column: int, dy0: Any, dy1: Any, x0: Any, x1: Any) -> None:
    """Adds 16 columns of two rows to their chains."""
    means, dy_sums, dy_xc_sums = places
    mean = load(_F32, means, column)
    xc0, xc1 = sub(x0, mean), sub(x1, mean)
    store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), add(dy0, dy1)))
    store(_F32, dy_xc_sums, column, add(load(_F32, dy_xc_sums, column), fma(dy1, xc1, mul(dy0, xc0))))


@internal
def _sum_row(tag: Any, p: Any, slot: int, t: int, index: int, runs: int, first: int, columns: int) -> None:
    y_backprop, x, chains = p.y_backprop, p.x, chains_of(p, slot, t)
    places = _line_means(tag, p, slot, t), chains, chains + 4 * p.padded
    for run in range(runs):
        at, start = index + run * _gap(p), run * p.pitch + first
        stop = start + columns
        for column in range(start, stop - LINE + 1, LINE):
            dy, xs = load_line(tag, y_backprop, at + column), load_line(tag, x, at + column)
            _add_single(places, column, dy[0], xs[0])
            _add_single(places, column + LANES, dy[1], xs[1])
        for column in range(stop - columns % LINE, stop, LANES):
            _sum_head(tag, p, slot, chains, at, column, stop - column)
    if not p.is_training:
        _scale_row(tag, p, slot, index, runs, first, columns)


@internal
def _add_single(places: Any, column: int, dy: Any, x: Any) -> None:
    """Adds 16 columns of a row to their chains."""
    means, dy_sums, dy_xc_sums = places
    xc = sub(x, load(_F32, means, column))
    store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), dy))
    store(_F32, dy_xc_sums, column, fma(dy, xc, load(_F32, dy_xc_sums, column)))


@internal
def _sum_pair_head(tag: Any, p: Any, slot: int, chains: int, upper: int, column: int, count: int) -> None:
    """Sums up to 16 columns of two rows, as `_add_pair` does."""
    lower = upper + p.columns
    dy0 = load_head(tag, p.y_backprop, upper + column, count)
    dy1 = load_head(tag, p.y_backprop, lower + column, count)
    xc0, xc1 = _centred_head(tag, p, slot, upper, column, count), _centred_head(tag, p, slot, lower, column, count)
    dy_sums, dy_xc_sums = chains, chains + 4 * p.padded
    store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), add(dy0, dy1)))
    store(_F32, dy_xc_sums, column, add(load(_F32, dy_xc_sums, column), fma(dy1, xc1, mul(dy0, xc0))))


@internal
def _sum_head(tag: Any, p: Any, slot: int, chains: int, index: int, column: int, count: int) -> None:
    """Sums up to 16 columns of a row."""
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
            dy = load_line(tag, y_backprop, at + column)
            gain0, gain1 = in_line_order(tag, load(_F32, gain, column), load(_F32, gain, column + LANES))
            _write_line(tag, out, at + column, mul(gain0, dy[0]), mul(gain1, dy[1]), streams)
        for column in range(stop - columns % LINE, stop, LANES):
            count = stop - column
            dx = mul(load(_F32, gain, column), load_head(tag, y_backprop, at + column, count))
            store_head(tag, out, at + column, dx, count)


@internal
def _apply_row(tag: Any, p: Any, slot: int, t: int, index: int, runs: int, first: int, columns: int) -> None:
    y_backprop, x, out, ahead, streams = p.y_backprop, p.x, p.x_backprop, p.ahead, p.streams
    tables = table(p, slot, MEAN), table(p, slot, GAIN), table(p, slot, SHIFT), table(p, slot, SLOPE)
    line_tables = (
        _line_table(tag, p, slot, t, MEAN), _line_table(tag, p, slot, t, GAIN),
        _line_table(tag, p, slot, t, SHIFT), _line_table(tag, p, slot, t, SLOPE),
    )  # fmt: skip
    for run in range(runs):
        at, start = index + run * _gap(p), run * p.pitch + first
        stop = start + columns
        for column in range(start, stop - LINE + 1, LINE):
            prefetch(tag, y_backprop, at + column + ahead)
            prefetch(tag, x, at + column + ahead)
            dy, xs = load_line(tag, y_backprop, at + column), load_line(tag, x, at + column)
            dx0 = _gradients(dy[0], xs[0], line_tables, column)
            dx1 = _gradients(dy[1], xs[1], line_tables, column + LANES)
            _write_line(tag, out, at + column, dx0, dx1, streams)
        for column in range(stop - columns % LINE, stop, LANES):
            count = stop - column
            dy_head, x_head = load_head(tag, y_backprop, at + column, count), load_head(tag, x, at + column, count)
            store_head(tag, out, at + column, _gradients(dy_head, x_head, tables, column), count)


@internal
def _write_line(tag: Any, address: int, index: int, first: Any, second: Any, streams: int) -> None:
    if streams:
        stream_line(tag, address, index, first, second)
    else:
        store_line(tag, address, index, first, second)


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
