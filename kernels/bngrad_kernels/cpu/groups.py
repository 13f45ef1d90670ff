"""What both kernels do for a whole group of channels: before the sums, and between the sums and x_backprop.

A slot of the workspace holds one group's tables: the mean and the coefficients of each column in float32, the sums of
each column and each tile's part of them in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from bngrad_kernels.cpu.plan import LANES
from bngrad_kernels.cpu.simd import add, load64, load_scalar, store64, store_scalar

MEAN, GAIN, SHIFT, SLOPE = range(4)
"""The tables: ``x_backprop = gain * ((y_backprop - shift) - (x - mean) * slope)``."""

_F32 = np.float32(0)
_F64 = np.float64(0)
_BF16 = np.uint16(0)


@njit(error_model="numpy")
def width(p: Any, g: int) -> int:
    """The number of columns of a group."""
    return p.fold * channels(p, g) * p.span


@njit(error_model="numpy")
def channels(p: Any, g: int) -> int:
    """The number of channels of a group; the last group may have fewer than the others."""
    return min(p.group_channels, p.channels - g * p.group_channels)


@njit(error_model="numpy")
def table(p: Any, slot: int, which: int) -> int:
    """The address of a table of a slot."""
    return p.workspace + slot * p.slot_nbytes + which * p.padded * 4


@njit(error_model="numpy")
def sums_of(p: Any, slot: int, part: int) -> int:
    """The address of the two rows of sums; part 0 is the total, tile t has part t + 1."""
    return p.workspace + slot * p.slot_nbytes + 4 * p.padded * 4 + part * 2 * p.padded * 8


@njit(error_model="numpy")
def chains_of(p: Any, slot: int, t: int) -> int:
    """The address of the two rows of float32 in which tile t adds up what goes into its sums."""
    return sums_of(p, slot, p.tiles + 1) + t * 2 * p.padded * 4


@njit(error_model="numpy")
def begin(p: Any, g: int, slot: int) -> None:
    """Fills the tables that the first pass needs."""
    first = g * p.group_channels
    for i in range(channels(p, g)):
        c = first + i
        _fill(p, g, slot, MEAN, i, _stat(p, p.mean, c))
        if not p.is_training:
            _fill(p, g, slot, GAIN, i, _scale(p, c) * _rstd(p, c))


@njit(error_model="numpy")
def finish(p: Any, g: int, slot: int) -> None:
    """Adds up the tiles, writes scale_backprop and offset_backprop, fills the coefficients."""
    _add_tiles(p, slot)
    first = g * p.group_channels
    m = float(p.outer * p.inner)
    for i in range(channels(p, g)):
        c = first + i
        sum_dy = _add_columns(p, g, sums_of(p, slot, 0), i)
        sum_dy_xc = _add_columns(p, g, sums_of(p, slot, 0) + p.padded * 8, i)
        rstd = _rstd(p, c)
        _write(p, p.scale_backprop, c, rstd * sum_dy_xc if m else 0.0)  # whatever rstd is
        _write(p, p.offset_backprop, c, sum_dy)
        if p.is_training:
            _fill(p, g, slot, GAIN, i, _scale(p, c) * rstd)
            _fill(p, g, slot, SHIFT, i, sum_dy / m)
            _fill(p, g, slot, SLOPE, i, rstd * rstd * (sum_dy_xc / m))


@njit(error_model="numpy")
def _add_tiles(p: Any, slot: int) -> None:
    into = sums_of(p, slot, 0)
    for column in range(0, 2 * p.padded, LANES):
        total = load64(sums_of(p, slot, 1), column)
        for part in range(2, p.tiles + 1):
            total = add(total, load64(sums_of(p, slot, part), column))
        store64(into, column, total)


@njit(error_model="numpy")
def _add_columns(p: Any, g: int, sums: int, i: int) -> float:
    total = 0.0
    for f in range(p.fold):
        start = (f * channels(p, g) + i) * p.span
        for column in range(start, start + p.span):
            total += load_scalar(_F64, sums, column)
    return total


@njit(error_model="numpy")
def _fill(p: Any, g: int, slot: int, which: int, i: int, value: float) -> None:
    """Sets a table at every column of the group's i-th channel."""
    for f in range(p.fold):
        start = (f * channels(p, g) + i) * p.span
        for column in range(start, start + p.span):
            store_scalar(_F32, table(p, slot, which), column, value)


@njit(error_model="numpy")
def _stat(p: Any, address: int, c: int) -> float:
    if p.is_stats_bfloat16:
        return float(load_scalar(_BF16, address, c))
    return float(load_scalar(_F32, address, c))


@njit(error_model="numpy")
def _write(p: Any, address: int, c: int, value: float) -> None:
    if p.is_stats_bfloat16:
        store_scalar(_BF16, address, c, value)
    else:
        store_scalar(_F32, address, c, value)


@njit(error_model="numpy")
def _scale(p: Any, c: int) -> float:
    return _stat(p, p.scale, c) if p.scale else 1.0


@njit(error_model="numpy")
def _rstd(p: Any, c: int) -> float:
    value = _stat(p, p.reserve_space_2, c)
    return value if p.is_inverse_std else 1.0 / math.sqrt(value + p.epsilon)
