"""The arithmetic of both second-order kernels on up to 16 elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels.cpu.channel_stats import table
from bngrad_kernels.cpu.machine_code.heads import load_head, store_head
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import LANES
from bngrad_kernels.cpu.second_order.channel_stats import (
    DY_BY_GRAD_DX,
    DY_BY_XH,
    DY_MEAN,
    DY_OFFSET,
    GRAD_DX_MEAN,
    MEAN,
    MEAN_REST,
    RSTD,
    X_BY_DY,
    X_BY_GRAD_DX,
    X_BY_XH,
)
from bngrad_kernels.cpu.simd import fma, keep_head, load, mul, store, stream, sub
from bngrad_kernels.cpu.simd64 import widen64

_F32 = np.float32(0)


@internal
def read_terms(tag: Any, p: Any, index: int, count: int, pivot: Any) -> Any:
    """``grad_x_backprop``, ``y_backprop`` and ``x - pivot`` in float64; zeros after the first ``count``."""
    u, dy = _read(tag, p.grad_x_backprop, index, count), _read(tag, p.y_backprop, index, count)
    x = _read(tag, p.x, index, count)
    k = pivot if count >= LANES else keep_head(pivot, count)
    return widen64(u), widen64(dy), sub(widen64(x), widen64(k))


@internal
def coefficients(p: Any, slot: int, column: int) -> Any:
    """The coefficients of 16 columns, in the order of the tables."""
    return (
        _coefficient(p, slot, MEAN, column),
        _coefficient(p, slot, MEAN_REST, column),
        _coefficient(p, slot, RSTD, column),
        _coefficient(p, slot, GRAD_DX_MEAN, column),
        _coefficient(p, slot, DY_MEAN, column),
        _coefficient(p, slot, DY_BY_GRAD_DX, column),
        _coefficient(p, slot, DY_BY_XH, column),
        _coefficient(p, slot, DY_OFFSET, column),
        _coefficient(p, slot, X_BY_DY, column),
        _coefficient(p, slot, X_BY_GRAD_DX, column),
        _coefficient(p, slot, X_BY_XH, column),
    )


@internal
def write_outputs(tag: Any, p: Any, index: int, count: int, tables: Any) -> None:
    """Writes the outputs of at most ``count`` elements from ``index`` on, from their `coefficients`."""
    grad_y_backprop, grad_x = _outputs(tag, p, index, count, tables)
    _write(tag, p.grad_y_backprop, index, grad_y_backprop, count)
    _write(tag, p.grad_x, index, grad_x, count)


@internal
def stream_outputs(tag: Any, p: Any, index: int, low: Any, high: Any) -> None:
    """Writes the outputs of 32 elements that begin a cache line, from the `coefficients` of each half."""
    low_grad_y_backprop, low_grad_x = _outputs(tag, p, index, LANES, low)
    high_grad_y_backprop, high_grad_x = _outputs(tag, p, index + LANES, LANES, high)
    stream(tag, p.grad_y_backprop, index, low_grad_y_backprop, high_grad_y_backprop)
    stream(tag, p.grad_x, index, low_grad_x, high_grad_x)


@internal
def _outputs(tag: Any, p: Any, index: int, count: int, tables: Any) -> Any:
    mean, rest, rstd, u_mean, dy_mean, dy_by_u, dy_by_xh, dy_offset, x_by_dy, x_by_u, x_by_xh = tables
    u, dy = _read(tag, p.grad_x_backprop, index, count), _read(tag, p.y_backprop, index, count)
    xc = sub(_read(tag, p.x, index, count), mean)
    if p.is_training:
        xh, u, dy = mul(sub(xc, rest), rstd), sub(u, u_mean), sub(dy, dy_mean)
        grad_x = fma(x_by_dy, dy, fma(x_by_u, u, mul(x_by_xh, xh)))
    else:
        xh = mul(xc, rstd)
        grad_x = mul(x_by_dy, dy)
    return fma(dy_by_u, u, fma(dy_by_xh, xh, dy_offset)), grad_x


@internal
def _coefficient(p: Any, slot: int, which: int, column: int) -> Any:
    return load(_F32, table(p, slot, which), column)


@internal
def _read(tag: Any, address: int, index: int, count: int) -> Any:
    """At most ``count`` elements from ``index`` on, then zeros."""
    if count >= LANES:
        return load(tag, address, index)
    return load_head(tag, address, index, count)


@internal
def _write(tag: Any, address: int, index: int, value: Any, count: int) -> None:
    """Writes at most ``count`` elements from ``index`` on."""
    if count < LANES:
        store_head(tag, address, index, value, count)
    else:
        store(tag, address, index, value)
