"""Cuts a tensor into tiles for the GPU. The cut, hence the order of every addition, follows from shape and dtype alone.

A tensor is (outer, channels, inner) in memory. Its channels are cut into groups, whose sums are independent. A row of a
group is ``group_channels * inner`` contiguous elements, cut into vectors of 16 bytes; the vectors of all rows are the
group's slots. The threads of a block take ``sweep`` slots in each step. A tile of ``tile_steps`` steps is the unit of a
block's work; at its end the threads' sums are added up in float64. Both orders use the same cut.

The bits depend neither on where a group begins nor on whether its vectors can be loaded in one piece: a sum runs over
the rows of one channel, in an order that `Cut` gives. So a range of channels has the same bits as within the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from bngrad_kernels.spec import Spec

THREADS = 256
VECTOR_NBYTES = 16

_WARP = 32
_MAX_GROUP_CHANNELS = 256
_PLANES_FROM = 512
"""With at least this many inner elements a group is one channel, as its rows fill the threads well enough."""
_RUN_NBYTES = 256
"""The minimum length of a contiguous read; shorter ones make the memory slower."""
_WORTHWHILE_NBYTES = 32 << 10
"""Groups are widened to at least this size, as scheduling a work tile has a cost."""
_BLOCKS = 264
"""How many blocks an H100 runs at a time: small tensors are cut into about as many tiles, or a multiple."""
_LONGEST_TILE, _SHORTEST_TILE = 16, 8
"""Steps of a tile. The longest is also the limit for a thread's chain of additions in float32."""


class Cut(NamedTuple):
    """How a tensor is cut.

    Attributes:
        rows: Rows of every group; their distance is that of the tensor's rows.
        inner: Elements of one channel in a row.
        lanes: Elements of a vector.
        group_channels: Channels of a group; the last group may have fewer.
        vectors: Vectors of a row of a group; the last one may be partly filled.
        sweep: Active threads of a block: a multiple of ``vectors``, or all if a group is one channel.
        tile_steps: Steps of a tile; the last tile may have fewer. A thread adds up at most this many terms of a lane on
            its own, in float32 in the first order.
        tiles: Tiles of a group; at least 1.
        parts: Threads that add up one channel's numbers; a power of two.
    """

    rows: int
    inner: int
    lanes: int
    group_channels: int
    vectors: int
    sweep: int
    tile_steps: int
    tiles: int
    parts: int

    def groups(self, channels: int) -> int:
        """The number of groups of ``channels`` channels."""
        return -(-channels // self.group_channels)

    def is_vectorised(self, channels: int) -> bool:
        """Whether all vectors of an aligned tensor with ``channels`` channels are aligned to their 16 bytes."""
        return (channels * self.inner) % self.lanes == 0 and (self.group_channels * self.inner) % self.lanes == 0


def cut(spec: Spec) -> Cut:
    """The cut of a problem's tensors."""
    return _cut(spec.outer, spec.channels, spec.inner, spec.dtype.itemsize)


@functools.lru_cache(maxsize=4096)
def _cut(outer: int, channels: int, inner: int, itemsize: int) -> Cut:
    if channels == 1:
        outer, inner = min(outer * inner, 1), max(outer * inner, 1)  # all elements are contiguous in either layout
    lanes = VECTOR_NBYTES // itemsize
    group_channels = _group_channels(outer, max(channels, 1), max(inner, 1), lanes)
    vectors = -(-group_channels * max(inner, 1) // lanes)
    sweep = _sweep(group_channels, vectors)
    slots = outer * vectors if inner else 0
    tile_steps = _tile_steps(max(1, -(-channels // group_channels)), -(-slots // sweep))
    parts = min(_WARP, _power_of_two(THREADS // group_channels))
    return Cut(
        rows=outer if inner else 0,
        inner=max(inner, 1),
        lanes=lanes,
        group_channels=group_channels,
        vectors=vectors,
        sweep=sweep,
        tile_steps=tile_steps,
        tiles=max(1, -(-slots // (sweep * tile_steps))),
        parts=parts,
    )


def _tile_steps(groups: int, steps: int) -> int:
    """The steps of a tile: a group's tiles have equally many, and there are as many tiles as blocks, or a multiple."""
    tiles = -(-steps // _LONGEST_TILE)
    wanted = -(-groups * tiles // _BLOCKS) * _BLOCKS
    tiles = max(1, tiles, min(-(-wanted // groups), steps // _SHORTEST_TILE))
    return max(1, -(-steps // tiles))


def _sweep(group_channels: int, vectors: int) -> int:
    return THREADS if group_channels == 1 else THREADS // vectors * vectors


def _group_channels(outer: int, channels: int, inner: int, lanes: int) -> int:
    """The narrowest that gives long contiguous reads and enough work, of those that keep the most lanes busy."""
    if inner >= _PLANES_FROM or channels == 1:
        return 1
    itemsize = VECTOR_NBYTES // lanes
    widths = list(_widths(channels, inner, lanes))
    rows = [(width, width * inner * itemsize) for width in widths]
    wide = [width for width, nbytes in rows if nbytes >= _RUN_NBYTES and 2 * outer * nbytes >= _WORTHWHILE_NBYTES]
    return max(wide or widths[-1:], key=lambda width: (_busy(width, channels, inner, lanes), -width))


def _widths(channels: int, inner: int, lanes: int) -> Iterator[int]:
    """The possible group widths: at most a sweep, and whole vectors if the rows are and a sweep holds them."""
    unit = lanes // math.gcd(inner, lanes)
    if channels * inner % lanes or unit * inner > THREADS * lanes:
        unit = 1
    for width in range(unit, min(_MAX_GROUP_CHANNELS, channels) + unit, unit):
        if width * inner <= THREADS * lanes:
            yield width


def _busy(width: int, channels: int, inner: int, lanes: int) -> float:
    """The share of a block's lanes that groups of a width keep busy, in tenths; smaller differences do not matter."""
    vectors = -(-width * inner // lanes)
    used = _sweep(width, vectors) * width * inner / (vectors * lanes) / THREADS
    return int(10 * used * channels / (-(-channels // width) * width)) / 10


def _power_of_two(limit: int) -> int:
    """The largest power of two up to a limit."""
    return 1 << (limit.bit_length() - 1)
