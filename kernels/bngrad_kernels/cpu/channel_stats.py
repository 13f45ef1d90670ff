"""The per-channel step of both kernels: before the sums, and between the sums and x_backprop.

A slot of the workspace holds the tables of one group of channels: the mean and the coefficients of each column in
float32, the sums of each column and each tile's part of them in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bngrad_kernels.cpu.machine_code.heads import load_head, store_head
from bngrad_kernels.cpu.machine_code.hints import out_of_line
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import LANES
from bngrad_kernels.cpu.simd import add, load_scalar, mul, store_scalar, sub
from bngrad_kernels.cpu.simd64 import (
    divide64,
    load64,
    narrow64,
    splat64,
    sqrt64,
    store64,
    widen64,
    zero64,
)  # fmt: skip

MEAN, GAIN, SHIFT, SLOPE = map(np.int64, range(4))  # Numba would give a plain int another type
"""The tables: ``x_backprop = gain * ((y_backprop - shift) - (x - mean) * slope)``."""

_TOTAL = np.int64(0)
_F32 = np.float32(0)
_F64 = np.float64(0)
_BF16 = np.uint16(0)


@internal
def first_channel(p: Any, g: int) -> int:
    """The first channel of a group."""
    return p.first + g * p.group_channels


@internal
def channels(p: Any, g: int) -> int:
    """The number of channels of a group; the last group may have fewer than the others."""
    return min(p.group_channels, p.stop - first_channel(p, g))


@internal
def table(p: Any, slot: int, which: int) -> int:
    """The address of a table of a slot."""
    return p.workspace + slot * p.slot_nbytes + which * p.padded * 4


@internal
def sums_of(p: Any, slot: int, part: int) -> int:
    """The address of the rows of sums; part 0 is the total, part t + 1 is that of tile t."""
    return p.workspace + slot * p.slot_nbytes + p.tables * p.padded * 4 + part * p.sums * p.padded * 8


@internal
def scratch_of(p: Any, member: int) -> int:
    """The address of the rows of float32 that a thread has for itself, which stay in its cache."""
    return p.scratch + member * p.scratch_nbytes


@internal
def clear_sums(p: Any, slot: int, t: int) -> None:
    """Begins the sums of tile t."""
    for column in range(0, p.sums * p.padded, LANES):
        store64(sums_of(p, slot, t + 1), column, zero64())


@internal
def begin(tag: Any, p: Any, g: int, slot: int) -> None:
    """Fills the tables for the first pass."""
    out_of_line()
    first = first_channel(p, g)
    for i in range(channels(p, g)):
        c = first + i
        fill(p, slot, MEAN, i, stat(p, p.mean, c))
        if not p.is_training:
            fill(p, slot, GAIN, i, scale_of(p, c) * rstd_of(p, c))


@internal
def finish(p: Any, g: int, slot: int, may_repeat: int, share: int, shares: int) -> bool:
    """Does a thread's share of the channels: adds up the tiles' sums, writes the vectors, fills the coefficients.

    Returns false: unlike those of the second order, the sums are never taken again.
    """
    out_of_line()
    if p.outer and p.span == 1 and not (p.is_planes or p.is_stats_bfloat16):
        vectors = -(-channels(p, g) // LANES)
        for vector in range(share * vectors // shares, (share + 1) * vectors // shares):
            _finish_vector(p, g, slot, vector * LANES)
    elif share == 0:
        add_tiles(p, slot)
        for i in range(channels(p, g)):
            _finish_channel(p, g, slot, i)
    return False


@internal
def _finish_channel(p: Any, g: int, slot: int, i: int) -> None:
    c = first_channel(p, g) + i
    m = float(p.outer * p.inner)
    sum_dy = add_columns(p, sums_of(p, slot, _TOTAL), i)
    sum_dy_xc = add_columns(p, sums_of(p, slot, _TOTAL) + p.padded * 8, i)
    rstd = rstd_of(p, c)
    write_stat(p, p.scale_backprop, c, rstd * sum_dy_xc if m else 0.0)  # 0 even if rstd is not finite
    write_stat(p, p.offset_backprop, c, sum_dy)
    if p.is_training:
        fill(p, slot, GAIN, i, scale_of(p, c) * rstd)
        fill(p, slot, SHIFT, i, sum_dy / m)
        fill(p, slot, SLOPE, i, rstd * rstd * (sum_dy_xc / m))


@internal
def _finish_vector(p: Any, g: int, slot: int, i: int) -> None:
    """As `_finish_channel`, for 16 channels of one column, or one for each fold, with float32 statistics."""
    c, count = first_channel(p, g) + i, channels(p, g) - i
    m = splat64(float(p.outer * p.inner))
    sum_dy, sum_dy_xc = _add_vectors(p, slot, i), _add_vectors(p, slot, p.padded + i)
    rstd = widen64(load_head(_F32, p.reserve_space_2, c, count))
    if not p.is_inverse_std:
        rstd = divide64(splat64(1.0), sqrt64(add(rstd, splat64(p.epsilon))))
    scale_backprop = mul(rstd, sum_dy_xc) if p.outer * p.inner else zero64()  # 0 even if rstd is not finite
    store_head(_F32, p.scale_backprop, c, narrow64(scale_backprop), count)
    store_head(_F32, p.offset_backprop, c, narrow64(sum_dy), count)
    if p.is_training:
        gain = mul(widen64(load_head(_F32, p.scale, c, count)), rstd) if p.scale else rstd
        slope = mul(mul(rstd, rstd), divide64(sum_dy_xc, m))
        gain32, shift32, slope32 = narrow64(gain), narrow64(divide64(sum_dy, m)), narrow64(slope)
        for f in range(p.fold):
            column = f * p.pitch + i
            store_head(_F32, table(p, slot, GAIN), column, gain32, count)
            store_head(_F32, table(p, slot, SHIFT), column, shift32, count)
            store_head(_F32, table(p, slot, SLOPE), column, slope32, count)


@internal
def _add_vectors(p: Any, slot: int, column: int) -> Any:
    """The sums of 16 channels, over the tiles and then the folds."""
    total = _add_vector(p, slot, column)
    if p.fold > 1:
        total = add(zero64(), total)
        for f in range(1, p.fold):
            total = add(total, _add_vector(p, slot, column + f * p.pitch))
    return total


@internal
def _add_vector(p: Any, slot: int, column: int) -> Any:
    """The sums of a vector over the tiles, in the order of the tiles."""
    total = load64(sums_of(p, slot, _TOTAL + 1), column)
    for part in range(2, p.tiles + 1):
        total = add(total, load64(sums_of(p, slot, part), column))
    return total


@internal
def add_tiles(p: Any, slot: int) -> None:
    """Adds up the sums of the tiles, in the order of the tiles."""
    into = sums_of(p, slot, _TOTAL)
    for column in range(0, p.sums * p.padded, LANES):
        store64(into, column, _add_vector(p, slot, column))


@internal
def add_columns(p: Any, sums: int, i: int) -> float:
    """Returns a sum of the group's i-th channel, from a row of sums."""
    if p.fold * p.span == 1:
        return float(load_scalar(_F64, sums, i))
    return _add_several_columns(p, sums, i)


@internal
def _add_several_columns(p: Any, sums: int, i: int) -> float:
    out_of_line()
    total = 0.0
    for f in range(p.fold):
        start = f * p.pitch + i * p.span
        for column in range(start, start + p.span):
            total += load_scalar(_F64, sums, column)
    return total


@internal
def fill(p: Any, slot: int, which: int, i: int, value: float) -> None:
    """Sets a table at every column of the group's i-th channel; in the planes kernel, in all lanes."""
    into = table(p, slot, which)
    span = LANES if p.is_planes else p.span
    if p.fold * span == 1:
        store_scalar(_F32, into, i, value)
    else:
        _fill_several_columns(p, into, i, span, value)


@internal
def _fill_several_columns(p: Any, into: int, i: int, span: int, value: float) -> None:
    out_of_line()
    for f in range(p.fold):
        start = f * p.pitch + i * p.span
        for column in range(start, start + span):
            store_scalar(_F32, into, column, value)


@internal
def stat(p: Any, address: int, c: int) -> float:
    """An element of a 1-D input."""
    if p.is_stats_bfloat16:
        return float(load_scalar(_BF16, address, c))
    return float(load_scalar(_F32, address, c))


@internal
def write_stat(p: Any, address: int, c: int, value: float) -> None:
    """Writes an element of a 1-D output."""
    if p.is_stats_bfloat16:
        store_scalar(_BF16, address, c, value)
    else:
        store_scalar(_F32, address, c, value)


@internal
def scale_of(p: Any, c: int) -> float:
    """The scale of a channel; 1 if the problem has no scale."""
    return stat(p, p.scale, c) if p.scale else 1.0


@internal
def rstd_of(p: Any, c: int) -> float:
    """The inverse standard deviation of a channel, from reserve_space_2."""
    value = stat(p, p.reserve_space_2, c)
    return value if p.is_inverse_std else 1.0 / math.sqrt(value + p.epsilon)


@internal
def x_backprop(dy: Any, x: Any, mean: Any, gain: Any, shift: Any, slope: Any) -> Any:
    """The gradient of x from the coefficients of its channels."""
    return mul(gain, sub(sub(dy, shift), mul(sub(x, mean), slope)))
