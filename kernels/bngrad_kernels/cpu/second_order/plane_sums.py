"""The planes kernel of the second order, see `bngrad_kernels.cpu.plane_sums`; all additions are in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels.cpu.channel_stats import first_channel, sums_of, table
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import LANES, LINE
from bngrad_kernels.cpu.plane_sums import bounds, first_line
from bngrad_kernels.cpu.second_order.channel_stats import MEAN
from bngrad_kernels.cpu.second_order.elements import coefficients, read_terms, stream_outputs, write_outputs
from bngrad_kernels.cpu.simd import add, fma, load, store_scalar
from bngrad_kernels.cpu.simd64 import total, zero64

_F32 = np.float32(0)
_F64 = np.float64(0)


@internal
def sums(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Sums a tile; in inference, also writes its outputs."""
    c = first_channel(p, g)
    first, last, start, stop = bounds(p, t)
    pivot = load(_F32, table(p, slot, MEAN), 0)
    u_sum = dy_sum = xk_sum = u_dy = u_xk = dy_xk = xk_xk = zero64()
    for n in range(first, last):
        base = (n * p.channels + c) * p.inner
        for i in range(start, stop, LANES):
            u, dy, xk = read_terms(tag, p, base + i, stop - i, pivot)
            u_sum, dy_sum, xk_sum = add(u_sum, u), add(dy_sum, dy), add(xk_sum, xk)
            u_dy, u_xk, dy_xk, xk_xk = fma(u, dy, u_dy), fma(u, xk, u_xk), fma(dy, xk, dy_xk), fma(xk, xk, xk_xk)
        if not p.is_training:
            _write_plane(tag, p, slot, base, start, stop)
    into, row_nbytes = sums_of(p, slot, t + 1), p.padded * 8
    store_scalar(_F64, into, 0, total(u_sum))
    store_scalar(_F64, into + row_nbytes, 0, total(dy_sum))
    store_scalar(_F64, into + 2 * row_nbytes, 0, total(xk_sum))
    store_scalar(_F64, into + 3 * row_nbytes, 0, total(u_dy))
    store_scalar(_F64, into + 4 * row_nbytes, 0, total(u_xk))
    store_scalar(_F64, into + 5 * row_nbytes, 0, total(dy_xk))
    store_scalar(_F64, into + 6 * row_nbytes, 0, total(xk_xk))


@internal
def apply(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Writes the outputs of a tile, last plane first: what the sums read last is still in the cache."""
    c = first_channel(p, g)
    first, last, start, stop = bounds(p, t)
    for back in range(last - first):
        _write_plane(tag, p, slot, ((last - 1 - back) * p.channels + c) * p.inner, start, stop)


@internal
def _write_plane(tag: Any, p: Any, slot: int, base: int, start: int, stop: int) -> None:
    tables = coefficients(p, slot, 0)
    i = start
    if p.streams:
        i = min(first_line(base + start) - base, stop)
        _write_some(tag, p, base + start, i - start, tables)
        while i + LINE <= stop:
            stream_outputs(tag, p, base + i, tables, tables)
            i += LINE
    _write_some(tag, p, base + i, stop - i, tables)


@internal
def _write_some(tag: Any, p: Any, index: int, count: int, tables: Any) -> None:
    for i in range(0, count, LANES):
        write_outputs(tag, p, index + i, count - i, tables)
