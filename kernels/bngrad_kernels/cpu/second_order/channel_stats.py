"""The per-channel step of both second-order kernels: before the sums, and after them.

In training the mean and the variance are x's own. One pass computes them together with the sums that need them, as it
subtracts a pivot ``k`` from x: the channel's first element. With ``d`` the mean of ``x - k``, the variance is the mean
of ``(x - k)**2`` less ``d**2``, and the other sums are similar. All of that is float64, so a pivot a few standard
deviations from the mean does no harm. If it is further away, the sums are taken again, with the mean as the pivot.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bngrad_kernels.cpu.channel_stats import (
    add_columns,
    add_tiles,
    channels,
    fill,
    first_channel,
    rstd_of,
    scale_of,
    stat,
    sums_of,
    table,
    write_stat,
)
from bngrad_kernels.cpu.machine_code.hints import out_of_line
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import FAR
from bngrad_kernels.cpu.simd import load_scalar

(MEAN, MEAN_REST, RSTD, GRAD_DX_MEAN, DY_MEAN, DY_BY_GRAD_DX, DY_BY_XH, DY_OFFSET, X_BY_DY, X_BY_GRAD_DX, X_BY_XH) = (
    map(np.int64, range(11))
)
"""The tables. With ``xh = ((x - mean) - mean_rest) * rstd``, ``u = grad_x_backprop`` and ``dy = y_backprop``::

    grad_y_backprop = dy_by_grad_dx * (u - grad_dx_mean) + dy_by_xh * xh + dy_offset
    grad_x          = x_by_dy * (dy - dy_mean) + x_by_grad_dx * (u - grad_dx_mean) + x_by_xh * xh

In inference they are the same without the means, and grad_x has only its first term. Until the sums are finished, MEAN
holds the pivot."""

SUM_U, SUM_DY, SUM_XK, SUM_U_DY, SUM_U_XK, SUM_DY_XK, SUM_XK_XK = map(np.int64, range(7))
"""The rows of sums, of ``u``, ``dy``, ``xk = x - pivot`` and their products."""

_TOTAL = np.int64(0)
_F32 = np.float32(0)


@internal
def begin(tag: Any, p: Any, g: int, slot: int) -> None:
    """Fills the tables for the first pass: the pivots, or in inference all tables that are used."""
    out_of_line()
    for i in range(channels(p, g)):
        c = first_channel(p, g) + i
        if not p.is_training:
            rstd, a = rstd_of(p, c), stat(p, p.grad_scale_backprop, c)
            fill(p, slot, MEAN, i, stat(p, p.mean, c))
            fill(p, slot, RSTD, i, rstd)
            fill(p, slot, DY_BY_GRAD_DX, i, scale_of(p, c) * rstd)
            fill(p, slot, DY_BY_XH, i, a)
            fill(p, slot, DY_OFFSET, i, stat(p, p.grad_offset_backprop, c))
            fill(p, slot, X_BY_DY, i, a * rstd)
        elif p.outer * p.inner:
            fill(p, slot, MEAN, i, float(load_scalar(tag, p.x, c * p.inner)))


@internal
def finish(p: Any, g: int, slot: int, may_repeat: int, share: int, shares: int) -> bool:
    """Adds up the tiles' sums, writes grad_scale, fills the tables; or moves pivots and returns true to sum again.

    Only pivots that are far from their means are moved, so that a channel's bits follow from its own elements alone.
    The first thread does it all.
    """
    out_of_line()
    if share:
        return False
    add_tiles(p, slot)
    if p.is_training and may_repeat and _move_pivots(p, g, slot):
        return True
    for i in range(channels(p, g)):
        if not p.outer * p.inner:
            write_stat(p, p.grad_scale, first_channel(p, g) + i, 0.0)
        elif p.is_training:
            _finish_channel(p, g, slot, i)
        else:
            c = first_channel(p, g) + i
            write_stat(p, p.grad_scale, c, rstd_of(p, c) * _sum(p, slot, SUM_U_DY, i))
    return False


@internal
def _move_pivots(p: Any, g: int, slot: int) -> bool:
    m = float(p.outer * p.inner)
    moved = False
    for i in range(channels(p, g)):
        distance = _sum(p, slot, SUM_XK, i) / m
        variance = _sum(p, slot, SUM_XK_XK, i) / m - distance * distance
        if distance * distance > FAR * variance:
            fill(p, slot, MEAN, i, _pivot(p, slot, i) + distance)
            moved = True
    return moved


@internal
def _finish_channel(p: Any, g: int, slot: int, i: int) -> None:
    """The formulae of `bngrad_kernels.reference`, with the terms of each tensor collected."""
    c = first_channel(p, g) + i
    m = float(p.outer * p.inner)
    scale, a = scale_of(p, c), stat(p, p.grad_scale_backprop, c)
    distance = _sum(p, slot, SUM_XK, i) / m
    variance = _sum(p, slot, SUM_XK_XK, i) / m - distance * distance
    if variance < 0.0:  # noqa: PLR1730 - from rounding; NaN has to remain
        variance = 0.0
    rstd = 1.0 / math.sqrt(variance + p.epsilon)
    mean = _pivot(p, slot, i) + distance
    u_mean, dy_mean = _sum(p, slot, SUM_U, i) / m, _sum(p, slot, SUM_DY, i) / m
    u_xh = rstd * (_sum(p, slot, SUM_U_XK, i) / m - distance * u_mean)
    dy_xh = rstd * (_sum(p, slot, SUM_DY_XK, i) / m - distance * dy_mean)
    u_p_dy = _sum(p, slot, SUM_U_DY, i) / m - u_mean * dy_mean - u_xh * dy_xh
    gain = scale * rstd
    x_by_dy, x_by_u = rstd * (a - gain * u_xh), -gain * rstd * dy_xh
    write_stat(p, p.grad_scale, c, rstd * m * u_p_dy)
    fill(p, slot, MEAN, i, mean)
    fill(p, slot, MEAN_REST, i, mean - float(load_scalar(_F32, table(p, slot, MEAN), i * p.span)))
    fill(p, slot, RSTD, i, rstd)
    fill(p, slot, GRAD_DX_MEAN, i, u_mean)
    fill(p, slot, DY_MEAN, i, dy_mean)
    fill(p, slot, DY_BY_GRAD_DX, i, gain)
    fill(p, slot, DY_BY_XH, i, a - gain * u_xh)
    fill(p, slot, DY_OFFSET, i, stat(p, p.grad_offset_backprop, c))
    fill(p, slot, X_BY_DY, i, x_by_dy)
    fill(p, slot, X_BY_GRAD_DX, i, x_by_u)
    fill(p, slot, X_BY_XH, i, -(x_by_dy * dy_xh + x_by_u * u_xh + gain * rstd * u_p_dy))


@internal
def _sum(p: Any, slot: int, which: int, i: int) -> float:
    return add_columns(p, sums_of(p, slot, _TOTAL) + which * p.padded * 8, i)


@internal
def _pivot(p: Any, slot: int, i: int) -> float:
    return float(load_scalar(_F32, table(p, slot, MEAN), i * p.span))
