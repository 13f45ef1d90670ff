"""The whole lines of up to 128 columns: their coefficients stay in registers, and the sums of short rows over a band.

Memory is read in address order here too.
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
from bngrad_kernels.cpu.simd import add, fma, load, load_line, sub, zero

_F32 = np.float32(0)


@internal
def add_rows(
    tag: Any, tensors: Any, tables: Any, into: int, padded: int, at: int, start: int, columns: int, rows: int
) -> None:
    """Adds some rows to the sums of their columns; in inference, also writes x_backprop."""
    out_of_line()
    means, gain = tables
    for row in range(0, rows, BAND):
        count, index = min(BAND, rows - row), at + row * tensors[3]
        _add_band(tag, tensors, means, into, padded, index, start, columns, count)
        if gain:
            _scale_rows(tag, tensors, gain, index, start, columns, count)


@internal
def write_rows(tag: Any, tensors: Any, tables: Any, at: int, start: int, columns: int, rows: int) -> None:
    """Writes x_backprop of some rows."""
    out_of_line()
    stop, column = start + columns - columns % LINE, start
    if column + 4 * LINE <= stop:
        _write_lines(tag, tensors, tables, at + column, column, rows, 4)
        column += 4 * LINE
    if column + 2 * LINE <= stop:
        _write_lines(tag, tensors, tables, at + column, column, rows, 2)
        column += 2 * LINE
    if column < stop:
        _write_lines(tag, tensors, tables, at + column, column, rows, 1)


@internal
def _scale_rows(tag: Any, tensors: Any, gain: int, at: int, start: int, columns: int, rows: int) -> None:
    y_backprop, _, out, pitch, _, streams = tensors
    for column in range(start, start + columns - LINE + 1, LINE):
        gains = gains_of_line(tag, gain, column)
        for row in range(rows):
            scale_line(tag, y_backprop, out, at + row * pitch + column, gains, streams)


@internal
def _add_band(
    tag: Any, tensors: Any, means: int, into: int, padded: int, at: int, start: int, columns: int, rows: int
) -> None:
    column, stop = start, start + columns - columns % LINE
    if column + 4 * LINE <= stop:
        _add_lines(tag, tensors, means, into, padded, at + column, column, rows, 4)
        column += 4 * LINE
    if column + 2 * LINE <= stop:
        _add_lines(tag, tensors, means, into, padded, at + column, column, rows, 2)
        column += 2 * LINE
    if column < stop:
        _add_lines(tag, tensors, means, into, padded, at + column, column, rows, 1)


@internal
def _add_lines(
    tag: Any, tensors: Any, means: int, into: int, padded: int, index: int, column: int, rows: int, lines: int
) -> None:
    """Adds 1, 2 or 4 lines of a band."""
    line0 = line1 = line2 = line3 = zero(), zero(), zero(), zero()
    mean0 = mean1 = mean2 = mean3 = _means_of_line(means, column)
    if lines > 1:
        mean1 = _means_of_line(means, column + LINE)
    if lines > 2:
        mean2, mean3 = _means_of_line(means, column + 2 * LINE), _means_of_line(means, column + 3 * LINE)
    for _ in range(rows // 2):
        line0 = _with_pair(tag, tensors, mean0, index, line0)
        if lines > 1:
            line1 = _with_pair(tag, tensors, mean1, index + LINE, line1)
        if lines > 2:
            line2 = _with_pair(tag, tensors, mean2, index + 2 * LINE, line2)
            line3 = _with_pair(tag, tensors, mean3, index + 3 * LINE, line3)
        index += 2 * tensors[3]
    if rows % 2:
        line0 = _with_row(tag, tensors, mean0, index, line0)
        if lines > 1:
            line1 = _with_row(tag, tensors, mean1, index + LINE, line1)
        if lines > 2:
            line2 = _with_row(tag, tensors, mean2, index + 2 * LINE, line2)
            line3 = _with_row(tag, tensors, mean3, index + 3 * LINE, line3)
    _add_to_sums(tag, into, padded, column, line0)
    if lines > 1:
        _add_to_sums(tag, into, padded, column + LINE, line1)
    if lines > 2:
        _add_to_sums(tag, into, padded, column + 2 * LINE, line2)
        _add_to_sums(tag, into, padded, column + 3 * LINE, line3)


@internal
def _means_of_line(means: int, column: int) -> Any:
    return load(_F32, means, column), load(_F32, means, column + LANES)


@internal
def _with_pair(tag: Any, tensors: Any, mean: Any, upper: int, line: Any) -> Any:
    """The sums of a line, with two rows added."""
    y_backprop, x, _, pitch, ahead, _ = tensors
    lower = upper + pitch
    if ahead[0]:
        prefetch_ahead(tag, y_backprop, upper, ahead)
        prefetch_ahead(tag, y_backprop, lower, ahead)
        prefetch_ahead(tag, x, upper, ahead)
        prefetch_ahead(tag, x, lower, ahead)
    in_order()  # LLVM would read one row after the other, which takes a tenth longer
    upper_dy, lower_dy = load_line(tag, y_backprop, upper), load_line(tag, y_backprop, lower)
    in_order()
    upper_x, lower_x = load_line(tag, x, upper), load_line(tag, x, lower)
    first = sum_of_products(upper_dy[0], sub(upper_x[0], mean[0]), lower_dy[0], sub(lower_x[0], mean[0]))
    second = sum_of_products(upper_dy[1], sub(upper_x[1], mean[1]), lower_dy[1], sub(lower_x[1], mean[1]))
    return (
        add(line[0], add(upper_dy[0], lower_dy[0])), add(line[1], add(upper_dy[1], lower_dy[1])),
        add(line[2], first), add(line[3], second),
    )  # fmt: skip


@internal
def _with_row(tag: Any, tensors: Any, mean: Any, index: int, line: Any) -> Any:
    """The sums of a line, with a row added."""
    y_backprop, x, _, _, _, _ = tensors
    dy, xs = load_line(tag, y_backprop, index), load_line(tag, x, index)
    return (
        add(line[0], dy[0]), add(line[1], dy[1]),
        fma(dy[0], sub(xs[0], mean[0]), line[2]), fma(dy[1], sub(xs[1], mean[1]), line[3]),
    )  # fmt: skip


@internal
def _add_to_sums(tag: Any, into: int, padded: int, column: int, line: Any) -> None:
    add_line_to_sums(tag, into, column, line[0], line[1])
    add_line_to_sums(tag, into, padded + column, line[2], line[3])


@internal
def _write_lines(tag: Any, tensors: Any, tables: Any, index: int, column: int, rows: int, lines: int) -> None:
    """Writes 1, 2 or 4 lines of some rows."""
    line0 = line1 = line2 = line3 = _coefficients_of_line(tables, column)
    if lines > 1:
        line1 = _coefficients_of_line(tables, column + LINE)
    if lines > 2:
        line2 = _coefficients_of_line(tables, column + 2 * LINE)
        line3 = _coefficients_of_line(tables, column + 3 * LINE)
    for _ in range(rows):
        _write(tag, tensors, line0, index)
        if lines > 1:
            _write(tag, tensors, line1, index + LINE)
        if lines > 2:
            _write(tag, tensors, line2, index + 2 * LINE)
            _write(tag, tensors, line3, index + 3 * LINE)
        index += tensors[3]


@internal
def _coefficients_of_line(tables: Any, column: int) -> Any:
    return coefficients(tables, column), coefficients(tables, column + LANES)


@internal
def _write(tag: Any, tensors: Any, of_line: Any, index: int) -> None:
    y_backprop, x, out, _, ahead, streams = tensors
    if ahead[0]:
        prefetch_ahead(tag, y_backprop, index, ahead)
        prefetch_ahead(tag, x, index, ahead)
        in_order()
    dy, xs = load_line(tag, y_backprop, index), load_line(tag, x, index)
    write_line(tag, out, index, gradients(dy[0], xs[0], of_line[0]), gradients(dy[1], xs[1], of_line[1]), streams)
