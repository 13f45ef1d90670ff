"""The ends of rows, which fill no line: up to two vectors, of which the second may be incomplete."""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels.cpu.columns.elements import add_to_sums, coefficients, gradients, sum_of_products
from bngrad_kernels.cpu.machine_code.heads import load_head, store_head
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import BAND, LANES, LINE
from bngrad_kernels.cpu.simd import add, fma, keep_head, load, mul, sub, zero

_F32 = np.float32(0)


@internal
def add_rows(
    tag: Any, tensors: Any, tables: Any, into: int, padded: int, at: int, start: int, columns: int, rows: int
) -> None:
    """Adds some rows to the sums of their columns, as for whole lines; in inference, also writes x_backprop."""
    means, gain = tables
    stop = start + columns
    for column in range(stop - columns % LINE, stop, LANES):
        for row in range(0, rows, BAND):
            index, count = at + row * tensors[3] + column, min(BAND, rows - row)
            dy_sum, dy_xc_sum = _sums_of_band(tag, tensors, load(_F32, means, column), index, stop - column, count)
            add_to_sums(into, column, dy_sum)
            add_to_sums(into, padded + column, dy_xc_sum)
        if gain:
            _scale_rows(tag, tensors, load(_F32, gain, column), at + column, stop - column, rows)


@internal
def write_rows(tag: Any, tensors: Any, tables: Any, at: int, start: int, columns: int, rows: int) -> None:
    """Writes x_backprop of some rows."""
    y_backprop, x, out, pitch, _, _ = tensors
    stop = start + columns
    for column in range(stop - columns % LINE, stop, LANES):
        count, of_columns = stop - column, coefficients(tables, column)
        for row in range(rows):
            index = at + row * pitch + column
            dy, xs = load_head(tag, y_backprop, index, count), load_head(tag, x, index, count)
            store_head(tag, out, index, gradients(dy, xs, of_columns), count)


@internal
def _scale_rows(tag: Any, tensors: Any, gain: Any, index: int, count: int, rows: int) -> None:
    y_backprop, _, out, pitch, _, _ = tensors
    for _ in range(rows):
        store_head(tag, out, index, mul(gain, load_head(tag, y_backprop, index, count)), count)
        index += pitch


@internal
def _sums_of_band(tag: Any, tensors: Any, mean: Any, index: int, count: int, rows: int) -> Any:
    """The sums of up to 16 columns over a band."""
    y_backprop, x, _, pitch, _, _ = tensors
    dy_sum, dy_xc_sum = zero(), zero()
    for _ in range(rows // 2):
        lower = index + pitch
        upper_dy, lower_dy = load_head(tag, y_backprop, index, count), load_head(tag, y_backprop, lower, count)
        upper_xc, lower_xc = _centred(tag, x, mean, index, count), _centred(tag, x, mean, lower, count)
        dy_sum = add(dy_sum, add(upper_dy, lower_dy))
        dy_xc_sum = add(dy_xc_sum, sum_of_products(upper_dy, upper_xc, lower_dy, lower_xc))
        index += 2 * pitch
    if rows % 2:
        dy = load_head(tag, y_backprop, index, count)
        dy_sum, dy_xc_sum = add(dy_sum, dy), fma(dy, _centred(tag, x, mean, index, count), dy_xc_sum)
    return dy_sum, dy_xc_sum


@internal
def _centred(tag: Any, x: int, mean: Any, index: int, count: int) -> Any:
    """The first elements of x less their mean; the other lanes have to be 0, even if the mean is not finite."""
    return keep_head(sub(load_head(tag, x, index, count), mean), count)
