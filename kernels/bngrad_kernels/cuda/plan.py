"""Cuts a tensor into tiles for the GPU. The cut, hence the order of every addition, follows from shape and dtype alone.

A tensor is (outer, channels, inner) in memory. Its channels are cut into groups, whose sums are independent. A row of a
group is ``group_channels * inner`` contiguous elements, cut into vectors of 16 bytes; the vectors of all rows are the
group's slots. The threads of a block take ``sweep`` slots in each step. After a segment of at most ``chain`` steps the
threads' sums are added up in float64. A tile of ``segments`` segments is a block's unit of work. Both orders use the
same cut.

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
_RUN_NBYTES, _SHORT_RUN_NBYTES = 128, 64
"""The minimum length of a contiguous read: a cache line, or the unit of memory transfers."""
_CACHED_NBYTES, _LARGEST_CACHED_NBYTES = 14 << 20, 55 << 20
"""A group with at most this much y_backprop and x is still in the second-level cache at its second read: on an A100 or
H100 with room for what is summed ahead, see `kernel_selection`; and on a B200, the GPU with the largest cache."""
_WORTHWHILE_NBYTES = 32 << 10
"""Groups are widened to at least this size, as scheduling a work tile has a cost."""
_ENOUGH_TILES = 512
"""Chains are shortened until there are this many tiles, so that every multiprocessor has work."""
_LONGEST_CHAIN, _SHORTEST_CHAIN = 32, 4
_MAX_TILES = 256
"""The limit for a group, since other blocks wait while one block adds up the tiles' sums."""


class Cut(NamedTuple):
    """How a tensor is cut.

    Attributes:
        rows: Rows of every group; their distance is that of the tensor's rows.
        inner: Elements of one channel in a row.
        lanes: Elements of a vector.
        group_channels: Channels of a group; the last group may have fewer.
        vectors: Vectors of a row of a group; the last one may be partly filled.
        sweep: Active threads of a block: a multiple of ``vectors``, or all if a group is one channel.
        chain: The maximum number of terms that a thread adds up on its own, in float32 in the first order.
        segments: Segments of a tile; the last tile may have fewer.
        tiles: Tiles of a group; at least 1.
        parts: Threads that add up one channel's numbers; a power of two.
    """

    rows: int
    inner: int
    lanes: int
    group_channels: int
    vectors: int
    sweep: int
    chain: int
    segments: int
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
    chain = _chain(-(-channels // group_channels), -(-slots // sweep))
    all_segments = max(1, -(-slots // (sweep * chain)))
    segments = -(-all_segments // _MAX_TILES)
    parts = min(_WARP, _power_of_two(THREADS // group_channels))
    return Cut(
        rows=outer if inner else 0,
        inner=max(inner, 1),
        lanes=lanes,
        group_channels=group_channels,
        vectors=vectors,
        sweep=sweep,
        chain=chain,
        segments=segments,
        tiles=-(-all_segments // segments),
        parts=parts,
    )


def _chain(groups: int, steps: int) -> int:
    """Short enough for every multiprocessor to have a tile, as far as a group may have more tiles."""
    chain = _LONGEST_CHAIN
    while chain > _SHORTEST_CHAIN and steps < chain * min(_MAX_TILES, -(-_ENOUGH_TILES // max(groups, 1))):
        chain //= 2
    return chain


def _sweep(group_channels: int, vectors: int) -> int:
    return THREADS if group_channels == 1 else THREADS // vectors * vectors


def _group_channels(outer: int, channels: int, inner: int, lanes: int) -> int:
    """Wide enough for contiguous reads of a cache line, and narrow enough to be read again from the cache."""
    if inner >= _PLANES_FROM or channels == 1:
        return 1
    itemsize = VECTOR_NBYTES // lanes

    def narrowest(run_nbytes: int) -> int:
        group_nbytes = [(width, 2 * outer * width * inner * itemsize) for width in widths]
        wide = [width for width, nbytes in group_nbytes
                if width * inner * itemsize >= run_nbytes and nbytes >= _WORTHWHILE_NBYTES]  # fmt: skip
        return max(wide or widths[-1:], key=lambda width: (_busy(width, channels, inner, lanes), -width))

    widths = list(_widths(channels, inner, lanes))
    width, short = narrowest(_RUN_NBYTES), narrowest(_SHORT_RUN_NBYTES)
    nbytes, short_nbytes = (2 * outer * each * inner * itemsize for each in (width, short))
    return short if short_nbytes <= _LARGEST_CACHED_NBYTES and nbytes > _CACHED_NBYTES else width


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
