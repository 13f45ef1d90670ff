"""The columns kernel of the second order, see `bngrad_kernels.cpu.columns`; all additions are in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels.cpu.channel_stats import clear_sums, sums_of, table
from bngrad_kernels.cpu.columns.tiles import first_row, index_of, run_columns, runs_of, whole_rows
from bngrad_kernels.cpu.machine_code.hints import prefetch
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import LANES, LINE
from bngrad_kernels.cpu.second_order.channel_stats import MEAN
from bngrad_kernels.cpu.second_order.elements import coefficients, read_terms, stream_outputs, write_outputs
from bngrad_kernels.cpu.simd import add, fma, load
from bngrad_kernels.cpu.simd64 import load64, store64

_BAND = 16
"""Rows computed at once."""
_BLOCK = 512
"""Columns computed at once: their sums stay in the first-level cache."""

_F32 = np.float32(0)


@internal
def sums(tag: Any, p: Any, g: int, t: int, slot: int, _scratch: int) -> None:
    """Sums a tile; in inference, also writes its outputs."""
    clear_sums(p, slot, t)
    _for_each_row(tag, p, g, t, slot, np.int64(1), 1 - p.is_training)


@internal
def apply(tag: Any, p: Any, g: int, t: int, slot: int, _scratch: int) -> None:
    """Writes the outputs of a tile."""
    _for_each_row(tag, p, g, t, slot, np.int64(0), np.int64(1))


@internal
def _for_each_row(tag: Any, p: Any, g: int, t: int, slot: int, summing: int, writing: int) -> None:
    """Goes through a tile band by band, block by block."""
    start, stop, whole = first_row(p, t), first_row(p, t + 1), whole_rows(p)
    for band in range(start, stop, _BAND):
        for first in range(0, run_columns(p, g, p.fold), _BLOCK):
            for row in range(band, min(stop, band + _BAND)):
                fold = p.fold if row < whole else p.last_fold  # the last row of all may be shorter
                end = min(first + _BLOCK, run_columns(p, g, fold))
                for run in range(runs_of(p, fold)):
                    index, shift = index_of(p, g, row) + run * p.channels * p.span, run * p.pitch
                    if summing:
                        _sum_columns(tag, p, slot, t, index, shift, first, end)
                    if writing:
                        _write_columns(tag, p, slot, index, shift, first, end)


@internal
def _write_columns(tag: Any, p: Any, slot: int, index: int, shift: int, first: int, end: int) -> None:
    """Writes a range of columns of a run, which begins at ``index`` in memory and at ``shift`` in the tables."""
    column = first
    while p.streams and column + LINE <= end:
        low, high = coefficients(p, slot, shift + column), coefficients(p, slot, shift + column + LANES)
        stream_outputs(tag, p, index + column, low, high)
        column += LINE
    while column < end:
        write_outputs(tag, p, index + column, end - column, coefficients(p, slot, shift + column))
        column += LANES


@internal
def _sum_columns(tag: Any, p: Any, slot: int, t: int, index: int, shift: int, first: int, end: int) -> None:
    pivots = table(p, slot, MEAN)
    into, row_nbytes = sums_of(p, slot, t + 1), p.padded * 8
    for offset in range(first, end, LANES):
        at, column = index + offset, shift + offset
        if offset % LINE == 0:
            prefetch(tag, p.grad_x_backprop, at + p.near)
            prefetch(tag, p.y_backprop, at + p.near)
            prefetch(tag, p.x, at + p.near)
        u, dy, xk = read_terms(tag, p, at, end - offset, load(_F32, pivots, column))
        place = into
        store64(place, column, add(load64(place, column), u))
        place += row_nbytes
        store64(place, column, add(load64(place, column), dy))
        place += row_nbytes
        store64(place, column, add(load64(place, column), xk))
        place += row_nbytes
        store64(place, column, fma(u, dy, load64(place, column)))
        place += row_nbytes
        store64(place, column, fma(u, xk, load64(place, column)))
        place += row_nbytes
        store64(place, column, fma(dy, xk, load64(place, column)))
        place += row_nbytes
        store64(place, column, fma(xk, xk, load64(place, column)))
