"""The planes kernel: sums along the planes of one channel, see `plan`."""

from __future__ import annotations

from typing import Any

import numpy as np

from bngrad_kernels.cpu.channel_stats import GAIN, MEAN, SHIFT, SLOPE, first_channel, sums_of, table, x_backprop
from bngrad_kernels.cpu.machine_code.heads import load_head, store_head
from bngrad_kernels.cpu.machine_code.hints import prefetch, prefetch_far
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import LANES, LINE, STEP, STEPS
from bngrad_kernels.cpu.simd import add, fma, keep_head, load, mul, store, store_scalar, stream, sub, zero
from bngrad_kernels.cpu.simd64 import total, widen64, zero64

_F32 = np.float32(0)
_F64 = np.float64(0)


@internal
def sums(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Sums a tile; in inference, also writes its x_backprop."""
    c = first_channel(p, g)
    mean, gain = _coefficient(p, slot, MEAN), _coefficient(p, slot, GAIN)
    if p.near:
        dy_sum, dy_xc_sum = _sum_planes(tag, p, c, t, mean, gain, 1)
    else:
        dy_sum, dy_xc_sum = _sum_planes(tag, p, c, t, mean, gain, 0)
    into = sums_of(p, slot, t + 1)
    store_scalar(_F64, into, 0, total(dy_sum))
    store_scalar(_F64, into, p.padded, total(dy_xc_sum))


@internal
def _sum_planes(tag: Any, p: Any, c: int, t: int, mean: Any, gain: Any, prefetches: int) -> Any:
    """Compiled twice, since to ask in the loop whether to prefetch takes small planes a twentieth longer."""
    tile = first, last, start, stop = bounds(p, t)
    pitch = p.channels * p.inner
    near, far = _distance(p.near, start, stop, pitch), _distance(p.far, start, stop, pitch)
    dy_sum = dy_xc_sum = zero64()
    for n in range(first, last):
        base = n * pitch + c * p.inner
        for i in range(start, stop, STEPS * STEP):
            block = min(STEPS * STEP, stop - i)
            ahead = 0, 0
            if prefetches:
                ahead = _to_be_summed(p, near, tile, base, i), _to_be_summed(p, far, tile, base, i)
            dy, dy_xc = _sum_block(tag, p, base + i, block, mean, ahead, prefetches)
            dy_sum, dy_xc_sum = add(dy_sum, widen64(dy)), add(dy_xc_sum, widen64(dy_xc))
        if not p.is_training:
            _scale_plane(tag, p, base + start, base + stop, gain)
    return dy_sum, dy_xc_sum


@internal
def _to_be_summed(p: Any, distance: tuple[int, int], tile: Any, base: int, i: int) -> int:
    """The distance in memory from an element of a plane to what is summed later."""
    first, last, start, stop = tile
    pitch = p.channels * p.inner
    ahead = distance[0] + (pitch - (stop - start) if i + distance[1] >= stop else 0)
    if base + i + ahead >= last * pitch:  # the next channel's first planes
        ahead += p.inner - (last - first) * pitch
    return ahead


@internal
def apply(tag: Any, p: Any, g: int, t: int, slot: int) -> None:
    """Writes x_backprop of a tile, last plane first: what the sums read last is still in the cache."""
    c = first_channel(p, g)
    tile = first, last, start, stop = bounds(p, t)
    mean, gain = _coefficient(p, slot, MEAN), _coefficient(p, slot, GAIN)
    shift, slope = _coefficient(p, slot, SHIFT), _coefficient(p, slot, SLOPE)
    pitch = p.channels * p.inner
    near, far = _distance(p.near, start, stop, -pitch), _distance(p.far, start, stop, -pitch)
    for back in range(last - first):
        base = (last - 1 - back) * pitch + c * p.inner
        i = start
        if p.streams:
            i = min(first_line(base + start) - base, stop)
            _apply_some(tag, p, base + start, i - start, mean, gain, shift, slope)
            while i + LINE <= stop:
                if p.near:
                    ahead = _to_be_written(p, near, tile, i), _to_be_written(p, far, tile, i)
                    _prefetch_line(tag, p, base + i, ahead)
                dy, x = load(tag, p.y_backprop, base + i), load(tag, p.x, base + i)
                low = x_backprop(dy, x, mean, gain, shift, slope)
                dy, x = load(tag, p.y_backprop, base + i + LANES), load(tag, p.x, base + i + LANES)
                stream(tag, p.x_backprop, base + i, low, x_backprop(dy, x, mean, gain, shift, slope))
                i += LINE
        _apply_some(tag, p, base + i, stop - i, mean, gain, shift, slope)


@internal
def _to_be_written(p: Any, distance: tuple[int, int], tile: Any, i: int) -> int:
    """The distance in memory from an element of a plane to what is written later."""
    _, _, start, stop = tile
    return distance[0] - (p.channels * p.inner + stop - start if i + distance[1] >= stop else 0)


@internal
def _distance(ahead: int, start: int, stop: int, step: int) -> tuple[int, int]:
    """A distance in memory, from one in the order of reading, and the part of it within a plane.

    ``step`` is the distance from each plane to the next one that is read.
    The processor prefetches a plane by itself, but knows neither its end nor the next one.
    """
    length = stop - start
    return ahead // length * step + ahead % length, ahead % length


@internal
def _prefetch_line(tag: Any, p: Any, index: int, ahead: tuple[int, int]) -> None:
    near, far = ahead
    prefetch(tag, p.y_backprop, index + near)
    prefetch(tag, p.x, index + near)
    prefetch_far(tag, p.y_backprop, index + far)
    prefetch_far(tag, p.x, index + far)


@internal
def _apply_some(tag: Any, p: Any, index: int, count: int, mean: Any, gain: Any, shift: Any, slope: Any) -> None:
    while count >= LANES:
        dy, x = load(tag, p.y_backprop, index), load(tag, p.x, index)
        store(tag, p.x_backprop, index, x_backprop(dy, x, mean, gain, shift, slope))
        index += LANES
        count -= LANES
    if count > 0:
        dy, x = load_head(tag, p.y_backprop, index, count), load_head(tag, p.x, index, count)
        store_head(tag, p.x_backprop, index, x_backprop(dy, x, mean, gain, shift, slope), count)


@internal
def first_line(index: int) -> int:
    """The first element from ``index`` on that begins a cache line, in an aligned tensor."""
    return index + -index % LINE


@internal
def bounds(p: Any, t: int) -> tuple[int, int, int, int]:
    """The planes of a tile, and the elements of each plane."""
    o, i = t // p.inner_tiles, t % p.inner_tiles
    return (
        o * p.outer // p.outer_tiles,
        (o + 1) * p.outer // p.outer_tiles,
        i * p.inner // p.inner_tiles,
        (i + 1) * p.inner // p.inner_tiles,
    )


@internal
def _coefficient(p: Any, slot: int, which: int) -> Any:
    return load(_F32, table(p, slot, which), 0)


@internal
def _sum_block(tag: Any, p: Any, index: int, count: int, mean: Any, ahead: tuple[int, int], prefetches: int) -> Any:
    """The sums over at most 4 steps, one per lane."""
    dy0 = dy1 = dy2 = dy3 = zero()
    dy_xc0 = dy_xc1 = dy_xc2 = dy_xc3 = zero()
    y_backprop, x = p.y_backprop, p.x
    while count >= STEP:
        if prefetches:
            _prefetch_line(tag, p, index, ahead)
            _prefetch_line(tag, p, index + LINE, ahead)
        g0, g1 = load(tag, y_backprop, index), load(tag, y_backprop, index + 16)
        g2, g3 = load(tag, y_backprop, index + 32), load(tag, y_backprop, index + 48)
        dy0, dy1, dy2, dy3 = add(dy0, g0), add(dy1, g1), add(dy2, g2), add(dy3, g3)
        dy_xc0 = fma(g0, sub(load(tag, x, index), mean), dy_xc0)
        dy_xc1 = fma(g1, sub(load(tag, x, index + 16), mean), dy_xc1)
        dy_xc2 = fma(g2, sub(load(tag, x, index + 32), mean), dy_xc2)
        dy_xc3 = fma(g3, sub(load(tag, x, index + 48), mean), dy_xc3)
        index += STEP
        count -= STEP
    if prefetches and count > 0:
        _prefetch_line(tag, p, index, ahead)
    # The remaining vectors rotate through the accumulators, so that the longest chain is 5.
    while count > 0:
        dy0, dy1, dy2, dy3 = dy1, dy2, dy3, add(dy0, load_head(tag, y_backprop, index, count))
        xc = keep_head(sub(load_head(tag, x, index, count), mean), count)
        product = fma(load_head(tag, y_backprop, index, count), xc, dy_xc0)
        dy_xc0, dy_xc1, dy_xc2, dy_xc3 = dy_xc1, dy_xc2, dy_xc3, product
        index += LANES
        count -= LANES
    return add(add(dy0, dy1), add(dy2, dy3)), add(add(dy_xc0, dy_xc1), add(dy_xc2, dy_xc3))


@internal
def _scale_plane(tag: Any, p: Any, start: int, stop: int, gain: Any) -> None:
    """Writes x_backprop of a plane in inference."""
    i = start
    if p.streams:
        i = min(first_line(start), stop)
        _scale_some(tag, p, start, i, gain)
        while i + LINE <= stop:
            low, high = load(tag, p.y_backprop, i), load(tag, p.y_backprop, i + LANES)
            stream(tag, p.x_backprop, i, mul(gain, low), mul(gain, high))
            i += LINE
    _scale_some(tag, p, i, stop, gain)


@internal
def _scale_some(tag: Any, p: Any, start: int, stop: int, gain: Any) -> None:
    while start + LANES <= stop:
        store(tag, p.x_backprop, start, mul(gain, load(tag, p.y_backprop, start)))
        start += LANES
    if start < stop:
        store_head(tag, p.x_backprop, start, mul(gain, load_head(tag, p.y_backprop, start, stop - start)), stop - start)
