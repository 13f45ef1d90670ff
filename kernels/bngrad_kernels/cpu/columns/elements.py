"""What the columns kernel does with some elements, however it goes through the rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels.cpu.channel_stats import x_backprop
from bngrad_kernels.cpu.machine_code.hints import prefetch, prefetch_far
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import LANES
from bngrad_kernels.cpu.simd import (
    add,
    fma,
    from_line_order,
    in_line_order,
    load,
    load_line,
    mul,
    store_line,
    stream_line,
)
from bngrad_kernels.cpu.simd64 import load64, store64, widen64

_F32 = np.float32(0)


@internal
def prefetch_ahead(tag: Any, address: int, index: int, ahead: Any) -> None:
    """Prefetches the lines of a tensor that lie at two distances beyond a line; none at the second, if it is 0."""
    near, far = ahead
    prefetch(tag, address, index + near)
    if far:
        prefetch_far(tag, address, index + far)


@internal
def sum_of_products(upper_dy: Any, upper_xc: Any, lower_dy: Any, lower_xc: Any) -> Any:
    """The sum over two rows of y_backprop times x less its mean."""
    return fma(lower_dy, lower_xc, mul(upper_dy, upper_xc))


@internal
def add_to_sums(sums: int, column: int, value: Any) -> None:
    """Adds to 16 sums in float64."""
    store64(sums, column, add(load64(sums, column), widen64(value)))


@internal
def add_line_to_sums(tag: Any, sums: int, column: int, first: Any, second: Any) -> None:
    """Adds a line to its sums in float64."""
    low, high = from_line_order(tag, first, second)
    add_to_sums(sums, column, low)
    add_to_sums(sums, column + LANES, high)


@internal
def coefficients(tables: Any, column: int) -> Any:
    """The coefficients of 16 columns."""
    mean, gain, shift, slope = tables
    return load(_F32, mean, column), load(_F32, gain, column), load(_F32, shift, column), load(_F32, slope, column)


@internal
def gradients(dy: Any, x: Any, coefficients: Any) -> Any:
    """x_backprop of 16 elements."""
    mean, gain, shift, slope = coefficients
    return x_backprop(dy, x, mean, gain, shift, slope)


@internal
def write_line(tag: Any, address: int, index: int, first: Any, second: Any, streams: int) -> None:
    """Writes a line of x_backprop."""
    if streams:
        stream_line(tag, address, index, first, second)
    else:
        store_line(tag, address, index, first, second)


@internal
def gains_of_line(tag: Any, gain: int, column: int) -> Any:
    """The gains of a line, in its order."""
    return in_line_order(tag, load(_F32, gain, column), load(_F32, gain, column + LANES))


@internal
def scale_line(tag: Any, y_backprop: int, out: int, index: int, gains: Any, streams: int) -> None:
    """Writes a line of x_backprop in inference."""
    dy = load_line(tag, y_backprop, index)
    write_line(tag, out, index, mul(gains[0], dy[0]), mul(gains[1], dy[1]), streams)
