"""The whole lines of long rows: memory is read in address order.

A core cannot have enough cache misses in flight for any other. Two rows are read at a time; their sums go to a row of
float32 in the first-level cache, and from there to float64 once per band.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels.cpu.columns.elements import (
    add_line_to_sums,
    coefficients,
    gains_of_line,
    gradients,
    prefetch_ahead,
    scale_line,
    sum_of_products,
    write_line,
)
from bngrad_kernels.cpu.machine_code.hints import in_order, out_of_line
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import BAND, LANES, LINE
from bngrad_kernels.cpu.simd import add, fma, load, load_line, store, sub, zero

_F32 = np.float32(0)


@internal
def add_rows(
    tag: Any, tensors: Any, tables: Any, chains: int, into: int, padded: int,
    at: int, start: int, columns: int, rows: int,
) -> None:  # fmt: skip
    """Adds some rows to the sums of their columns; in inference, also writes x_backprop."""
    out_of_line()
    means, gain = tables
    places = means, chains, chains + 4 * padded
    for row in range(0, rows, BAND):
        _add_band(tag, tensors, places, gain, at + row * tensors[3], start, columns, min(BAND, rows - row))
        _flush(tag, chains, into, start, columns)
        _flush(tag, chains, into, padded + start, columns)


@internal
def write_rows(tag: Any, tensors: Any, tables: Any, at: int, start: int, columns: int, rows: int) -> None:
    """Writes x_backprop of some rows."""
    out_of_line()
    _, _, _, pitch, (near, far), _ = tensors
    for _ in range(rows):
        if far:
            _write_row(tag, tensors, (near, far), tables, at, start, columns)
        else:
            _write_row(tag, tensors, (near, 0), tables, at, start, columns)
        at += pitch


@internal
def _write_row(tag: Any, tensors: Any, ahead: Any, tables: Any, at: int, start: int, columns: int) -> None:
    """Compiled twice, like `_add_pair`: to ask in the loop takes small tensors up to a tenth longer."""
    y_backprop, x, out, _, _, streams = tensors
    for column in range(start, start + columns - LINE + 1, LINE):
        index = at + column
        prefetch_ahead(tag, y_backprop, index, ahead)
        prefetch_ahead(tag, x, index, ahead)
        in_order()  # LLVM would prefetch after the computation
        dy, xs = load_line(tag, y_backprop, index), load_line(tag, x, index)
        dx0 = gradients(dy[0], xs[0], coefficients(tables, column))
        dx1 = gradients(dy[1], xs[1], coefficients(tables, column + LANES))
        write_line(tag, out, index, dx0, dx1, streams)


@internal
def _add_band(tag: Any, tensors: Any, places: Any, gain: int, at: int, start: int, columns: int, rows: int) -> None:
    near, far = tensors[4]
    for _ in range(rows // 2):
        if far:
            _add_pair(tag, tensors, (near, far), places, at, start, columns)
        else:
            _add_pair(tag, tensors, (near, 0), places, at, start, columns)
        if gain:
            _scale_rows(tag, tensors, gain, at, start, columns, 2)
        at += 2 * tensors[3]
    if rows % 2:
        _add_row(tag, tensors, places, at, start, columns)
        if gain:
            _scale_rows(tag, tensors, gain, at, start, columns, 1)


@internal
def _scale_rows(tag: Any, tensors: Any, gain: int, at: int, start: int, columns: int, rows: int) -> None:
    out_of_line()
    y_backprop, _, out, pitch, _, streams = tensors
    for _ in range(rows):
        for column in range(start, start + columns - LINE + 1, LINE):
            scale_line(tag, y_backprop, out, at + column, gains_of_line(tag, gain, column), streams)
        at += pitch


@internal
def _add_pair(tag: Any, tensors: Any, ahead: Any, places: Any, upper: int, start: int, columns: int) -> None:
    """Adds two rows to their chains."""
    y_backprop, x, _, pitch, _, _ = tensors
    lower, first, gap = upper + pitch, upper + start, pitch - columns
    for column in range(start, start + columns - LINE + 1, LINE):
        place = 2 * (column - start)  # a pair of rows is prefetched in the order of addresses: first its upper row
        if place >= columns:
            place += gap
        prefetch_ahead(tag, y_backprop, first + place, ahead)
        prefetch_ahead(tag, y_backprop, first + place + LINE, ahead)
        prefetch_ahead(tag, x, first + place, ahead)
        prefetch_ahead(tag, x, first + place + LINE, ahead)
        upper_dy, upper_x = load_line(tag, y_backprop, upper + column), load_line(tag, x, upper + column)
        lower_dy, lower_x = load_line(tag, y_backprop, lower + column), load_line(tag, x, lower + column)
        _add_two_to_chains(places, column, upper_dy[0], lower_dy[0], upper_x[0], lower_x[0])
        _add_two_to_chains(places, column + LANES, upper_dy[1], lower_dy[1], upper_x[1], lower_x[1])


@internal
def _add_two_to_chains(places: Any, column: int, upper_dy: Any, lower_dy: Any, upper_x: Any, lower_x: Any) -> None:
    """Adds 16 columns of two rows."""
    means, dy_sums, dy_xc_sums = places
    mean = load(_F32, means, column)
    products = sum_of_products(upper_dy, sub(upper_x, mean), lower_dy, sub(lower_x, mean))
    store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), add(upper_dy, lower_dy)))
    store(_F32, dy_xc_sums, column, add(load(_F32, dy_xc_sums, column), products))


@internal
def _add_row(tag: Any, tensors: Any, places: Any, at: int, start: int, columns: int) -> None:
    """Adds a row to its chains."""
    y_backprop, x, _, _, _, _ = tensors
    for column in range(start, start + columns - LINE + 1, LINE):
        dy, xs = load_line(tag, y_backprop, at + column), load_line(tag, x, at + column)
        _add_one_to_chains(places, column, dy[0], xs[0])
        _add_one_to_chains(places, column + LANES, dy[1], xs[1])


@internal
def _add_one_to_chains(places: Any, column: int, dy: Any, x: Any) -> None:
    """Adds 16 columns of a row."""
    means, dy_sums, dy_xc_sums = places
    xc = sub(x, load(_F32, means, column))
    store(_F32, dy_sums, column, add(load(_F32, dy_sums, column), dy))
    store(_F32, dy_xc_sums, column, fma(dy, xc, load(_F32, dy_xc_sums, column)))


@internal
def _flush(tag: Any, chains: int, sums: int, start: int, columns: int) -> None:
    """Adds the chains to the sums in float64, and begins them again."""
    for column in range(start, start + columns - LINE + 1, LINE):
        add_line_to_sums(tag, sums, column, load(_F32, chains, column), load(_F32, chains, column + LANES))
        store(_F32, chains, column, zero())
        store(_F32, chains, column + LANES, zero())
