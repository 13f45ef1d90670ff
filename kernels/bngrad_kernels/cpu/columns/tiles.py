"""The tiles of the columns kernel: panels of their rows, and where these lie in memory and in the tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels.cpu.channel_stats import (
    GAIN,
    MEAN,
    SHIFT,
    SLOPE,
    channels,
    clear_sums,
    first_channel,
    sums_of,
    table,
)
from bngrad_kernels.cpu.columns import long_rows, row_ends, short_rows
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import BAND, BLOCK, LANES, LINE, SHORT
from bngrad_kernels.cpu.simd import in_line_order, is_rearranged, load, store, zero

_PANEL = 1 << 14
"""About this many elements are computed at once, which the second-level cache holds."""
_F32 = np.float32(0)


@internal
def sums(tag: Any, p: Any, g: int, t: int, slot: int, scratch: int) -> None:
    """Sums a tile; in inference, also writes its x_backprop."""
    clear_sums(p, slot, t)
    for column in range(0, 2 * p.padded, LANES):
        store(_F32, scratch, column, zero())
    _arrange(tag, p, g, table(p, slot, MEAN), _line_means(tag, p, slot, scratch))
    _for_each_panel(tag, p, g, t, slot, scratch, np.int64(1))


@internal
def apply(tag: Any, p: Any, g: int, t: int, slot: int, scratch: int) -> None:
    """Writes x_backprop of a tile."""
    for which in range(4):
        _arrange(tag, p, g, table(p, slot, which), _line_table(tag, p, slot, scratch, which))
    _for_each_panel(tag, p, g, t, slot, scratch, np.int64(0))


@internal
def _for_each_panel(tag: Any, p: Any, g: int, t: int, slot: int, scratch: int, is_summing: int) -> None:
    """Goes through a tile panel by panel: sums it, or writes x_backprop."""
    row, stop = first_row(p, t), first_row(p, t + 1)
    whole, columns = min(stop, whole_rows(p)), run_columns(p, g, p.fold)
    while row < whole:
        rows = min(_panel_rows(columns), whole - row)
        for column in range(0, columns, BLOCK):
            width = min(BLOCK, columns - column)
            _panel(tag, p, slot, t, scratch, index_of(p, g, row), rows, p.runs, column, width, is_summing)
        row += rows
    if stop > whole:
        runs, columns = runs_of(p, p.last_fold), run_columns(p, g, p.last_fold)
        one, first = np.int64(1), np.int64(0)  # Numba would compile all of it again for the literals 1 and 0
        _panel(tag, p, slot, t, scratch, index_of(p, g, whole), one, runs, first, columns, is_summing)


@internal
def _panel(
    tag: Any, p: Any, slot: int, t: int, scratch: int,
    index: int, rows: int, runs: int, first: int, columns: int, is_summing: int,
) -> None:  # fmt: skip
    if is_summing:
        _sum_panel(tag, p, slot, t, scratch, index, rows, runs, first, columns)
    else:
        _write_panel(tag, p, slot, scratch, index, rows, runs, first, columns)


@internal
def _panel_rows(columns: int) -> int:
    """The rows of a panel: whole bands."""
    return max(1, _PANEL // max(columns, 1) // BAND) * BAND


@internal
def _sum_panel(
    tag: Any, p: Any, slot: int, t: int, scratch: int, index: int, rows: int, runs: int, first: int, columns: int
) -> None:
    """Sums a range of columns of each run over some rows; in inference, also writes x_backprop there."""
    gain = np.int64(0) if p.is_training else table(p, slot, GAIN)
    tables, line_tables = (table(p, slot, MEAN), gain), (_line_means(tag, p, slot, scratch), gain)
    tensors, into, padded = _tensors(p, p.sums_near, p.sums_far), sums_of(p, slot, t + 1), p.padded
    for run in range(runs):
        at, start = index + run * _gap(p), run * p.pitch + first
        if p.is_short:
            short_rows.add_rows(tag, tensors, line_tables, into, padded, at, start, columns, rows)
        else:
            long_rows.add_rows(tag, tensors, line_tables, scratch, into, padded, at, start, columns, rows)
        row_ends.add_rows(tag, tensors, tables, into, padded, at, start, columns, rows)


@internal
def _write_panel(
    tag: Any, p: Any, slot: int, scratch: int, index: int, rows: int, runs: int, first: int, columns: int
) -> None:
    """Writes x_backprop of a range of columns of each run over some rows."""
    tensors = _tensors(p, p.near, p.far)
    tables = table(p, slot, MEAN), table(p, slot, GAIN), table(p, slot, SHIFT), table(p, slot, SLOPE)
    line_tables = (
        _line_table(tag, p, slot, scratch, MEAN), _line_table(tag, p, slot, scratch, GAIN),
        _line_table(tag, p, slot, scratch, SHIFT), _line_table(tag, p, slot, scratch, SLOPE),
    )  # fmt: skip
    for run in range(runs):
        at, start = index + run * _gap(p), run * p.pitch + first
        if columns <= SHORT:
            short_rows.write_rows(tag, tensors, line_tables, at, start, columns, rows)
        else:
            long_rows.write_rows(tag, tensors, line_tables, at, start, columns, rows)
        row_ends.write_rows(tag, tensors, tables, at, start, columns, rows)


@internal
def _tensors(p: Any, near: int, far: int) -> Any:
    """The tensors, the distance of rows, those of what is prefetched, and whether x_backprop is streamed."""
    return p.y_backprop, p.x, p.x_backprop, p.columns, (near, far), p.streams


@internal
def _line_means(tag: Any, p: Any, slot: int, scratch: int) -> int:
    """The address of the means for whole lines, in their order."""
    return scratch + 2 * p.padded * 4 if is_rearranged(tag) else table(p, slot, MEAN)


@internal
def _line_table(tag: Any, p: Any, slot: int, scratch: int, which: int) -> int:
    """The address of a table for whole lines, in their order."""
    return scratch + which * p.padded * 4 if is_rearranged(tag) else table(p, slot, which)


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
