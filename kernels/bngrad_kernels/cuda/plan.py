"""How a tensor is cut for the GPU: from its shape and dtype alone, hence so is the order of every addition.

A tensor is (outer, channels, inner) in memory. Its channels are cut into groups, whose sums are independent. A row of a
group is ``group_channels * inner`` elements in a run, cut into vectors of 16 bytes; the vectors of all rows are the
group's slots. The threads of a block take ``sweep`` slots a step. After at most ``chain`` steps, a tile, the threads'
sums are added up in float64; ``tiles`` tiles, a strip, are one piece of work for a block. Both orders are cut
alike.

The bits do not depend on where a group begins, nor on whether its vectors can be loaded in one piece: a sum runs over
the rows of one channel, in an order given by `Cut`. So a range of the channels has the bits that it has in the whole.
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
"""From so many inner elements on, a group is one channel, and its rows fill the threads well enough."""
_RUN_NBYTES, _SHORT_RUN_NBYTES = 128, 64
"""The least that is read in a run: a cache line, or what memory moves at once."""
_CACHED_NBYTES = 28 << 20
"""A group of that many bytes of y_backprop and x is still in a large GPU's second-level cache when it is read again."""
_WORTHWHILE_NBYTES = 32 << 10
"""A group is widened until it has that many bytes, as drawing a ticket has its price."""
_ENOUGH_STRIPS = 512
"""Chains are shortened until there are that many strips, so that every processor has work."""
_LONGEST_CHAIN, _SHORTEST_CHAIN = 32, 4
_MAX_STRIPS = 256
"""Of a group; the block that adds them up keeps others waiting."""


class Cut(NamedTuple):
    """How a tensor is cut.

    Attributes:
        rows: Rows of every group, each as far from the next as the tensor's rows are.
        inner: Elements that a row holds of one channel.
        lanes: Elements of a vector.
        group_channels: Channels of a group; the last group may have fewer.
        vectors: Vectors of a row of a group, the last one perhaps not full.
        sweep: Threads of a block that take part: a multiple of ``vectors``, or all where a group is one channel.
        chain: The most terms that a thread adds up by itself, in float32 in the first order.
        tiles: Tiles of a strip, the last one perhaps with fewer.
        strips: Strips of a group; at least 1.
        parts: Threads that add up one channel's numbers; a power of two.
    """

    rows: int
    inner: int
    lanes: int
    group_channels: int
    vectors: int
    sweep: int
    chain: int
    tiles: int
    strips: int
    parts: int

    def groups(self, channels: int) -> int:
        """How many groups so many channels are."""
        return -(-channels // self.group_channels)

    def is_vectorised(self, channels: int) -> bool:
        """Whether every vector of a tensor with so many channels lies on its own 16 bytes, the tensor being aligned."""
        return (channels * self.inner) % self.lanes == 0 and (self.group_channels * self.inner) % self.lanes == 0


def cut(spec: Spec) -> Cut:
    """The cut of a problem's tensors."""
    return _cut(spec.outer, spec.channels, spec.inner, spec.dtype.itemsize)


@functools.lru_cache(maxsize=4096)
def _cut(outer: int, channels: int, inner: int, itemsize: int) -> Cut:
    if channels == 1:
        outer, inner = min(outer * inner, 1), max(outer * inner, 1)  # elements in a run, whatever the layout says
    lanes = VECTOR_NBYTES // itemsize
    group_channels = _group_channels(outer, max(channels, 1), max(inner, 1), lanes)
    vectors = -(-group_channels * max(inner, 1) // lanes)
    sweep = _sweep(group_channels, vectors)
    slots = outer * vectors if inner else 0
    chain = _chain(-(-channels // group_channels), -(-slots // sweep))
    all_tiles = max(1, -(-slots // (sweep * chain)))
    tiles = -(-all_tiles // _MAX_STRIPS)
    parts = min(_WARP, _power_of_two(THREADS // group_channels))
    return Cut(
        rows=outer if inner else 0,
        inner=max(inner, 1),
        lanes=lanes,
        group_channels=group_channels,
        vectors=vectors,
        sweep=sweep,
        chain=chain,
        tiles=tiles,
        strips=-(-all_tiles // tiles),
        parts=parts,
    )


def _chain(groups: int, steps: int) -> int:
    """Short enough for every processor to have a strip, where a group may have more of them."""
    chain = _LONGEST_CHAIN
    while chain > _SHORTEST_CHAIN and steps < chain * min(_MAX_STRIPS, -(-_ENOUGH_STRIPS // max(groups, 1))):
        chain //= 2
    return chain


def _sweep(group_channels: int, vectors: int) -> int:
    return THREADS if group_channels == 1 else THREADS // vectors * vectors


def _group_channels(outer: int, channels: int, inner: int, lanes: int) -> int:
    """Wide enough to read runs of a cache line, and narrow enough to be read again from the cache."""
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
    is_cached, is_short_cached = (2 * outer * w * inner * itemsize <= _CACHED_NBYTES for w in (width, short))
    return short if is_short_cached and not is_cached else width


def _widths(channels: int, inner: int, lanes: int) -> Iterator[int]:
    """The group widths to choose from: of whole vectors, where rows are and a sweep holds them; at most a sweep."""
    unit = lanes // math.gcd(inner, lanes)
    if channels * inner % lanes or unit * inner > THREADS * lanes:
        unit = 1
    for width in range(unit, min(_MAX_GROUP_CHANNELS, channels) + unit, unit):
        if width * inner <= THREADS * lanes:
            yield width


def _busy(width: int, channels: int, inner: int, lanes: int) -> float:
    """The share of a block's lanes that groups of a width keep busy, in tenths: less is not worth a choice."""
    vectors = -(-width * inner // lanes)
    used = _sweep(width, vectors) * width * inner / (vectors * lanes) / THREADS
    return int(10 * used * channels / (-(-channels // width) * width)) / 10


def _power_of_two(limit: int) -> int:
    """The largest power of two that is not above a limit."""
    return 1 << (limit.bit_length() - 1)
