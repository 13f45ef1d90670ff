"""Cuts a problem into tiles, and writes the record that describes it to the kernels.

Both kernels divide the work in the same way. The channels are cut into independent groups. The elements of a group are
cut into tiles, whose sums are added in the order of the tiles. The tiles, and the order of additions within them,
follow from shape and dtype alone, and so do the bits; it does not matter which thread computes which tile. The width of
a group does not affect the bits either, since no sum runs over more than one channel.

The columns kernel treats the tensor as a matrix of ``rows`` x ``columns`` and sums down the columns. It computes
channels-last tensors, and planes too small to fill vectors: there each element of a plane is a column, and the columns
of a channel are added up at the end. Narrow rows are folded: ``fold`` consecutive rows count as one, so that its
vectors are full. A row of up to 256 bytes is then short: its sums stay in registers. Channels-last tensors have a
single group.

The planes kernel sums along the planes of channels-first tensors, with one channel per group.

A part of the channels is computed in the tiles and the order of the whole, hence with the same bits. The channels that
are left out split each folded row into ``fold`` runs of columns.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from bngrad_kernels import machine
from bngrad_kernels.spec import BFLOAT16, FLOAT32, ReserveSpace2Kind, Spec

LANES = 16
LINE = 2 * LANES
"""This many elements fill whole cache lines, whatever their type."""

SHORT, _SHORT_NBYTES = 4 * LINE, 256
"""The sums of a row of up to 256 bytes stay in registers, and so do the coefficients of up to 128 columns."""
_MIN_COLUMNS, _MAX_LINES_COLUMNS = 64, 512
"""The columns kernel folds rows to whole lines of at least 64 columns, if that takes at most 512 columns, and others to
whole vectors of at least 512, if the tensor is long enough."""
_GROUP_CHANNELS = 32
"""The channels of a group of small planes, chosen for the second-level cache; a multiple of 32 keeps stores aligned."""
_PLANES_FROM = 128
"""Planes of at least this many elements go to the planes kernel, smaller ones to the columns kernel."""
_COLUMNS_TILE, _PLANES_TILE = 1 << 16, 1 << 14
"""The minimum number of elements of a tile, unless the tensor is smaller."""
_TILE_ROWS = 64
"""The minimum number of rows of a tile in the columns kernel, as each tile has its own sums of every column."""
_MAX_TILES = 64
_STREAM_FROM_NBYTES = {4: 3 << 20, 2: 12 << 20}
"""By element size: the outputs of tensors of at least this size bypass the caches (non-temporal stores). At about this
size the next reader loses what the kernel gains."""
_STREAM_TRAINING_FROM_NBYTES = 12 << 20 if machine.cache_nbytes() >= 32 << 20 else 0
"""The same for the first order in training, if it is more: to write 3 or 6 MB past its caches takes an AMD EPYC a third
longer where its cores share 32 MB, and a tenth less where they share no cache."""
_STREAM_PLANES_FROM = 512
"""Planes of at least this many elements are streamed; shorter ones lose more at their ends, which do not fill lines."""
_LINE_NBYTES = 64
"""The size of a cache line; streaming should write whole lines."""
BAND = 16
"""Rows that the columns kernel sums in float32: 8 additions of pairs, hence an error below 11 * 2**-24 of the sum of
moduli."""
STEP, STEPS = 4 * LANES, 4
"""The planes kernel adds a vector to each of four accumulators in a step, and after some steps the accumulators in
float64: a chain of 4 additions, plus 2 to join the accumulators."""
FAR = 2.0**10
"""In the second order, a pivot is far from the mean if the square of its distance is above this many variances."""
BLOCK = 1024
"""Columns that the columns kernel computes at once: their tables fill half of a first-level cache."""
_MODEL = machine.model()
_IS_SKYLAKE = _MODEL == ("GenuineIntel", 6, 85)
"""Or Cascade Lake or Cooper Lake, which have the same numbers. To prefetch to the second-level cache costs it up to an
eighth of the time."""
_NEAR_NBYTES, _FAR_NBYTES = 3072, 0 if _IS_SKYLAKE else 9216
"""The prefetch distances of the columns kernel, to the first-level and to the second-level cache; whole pairs of rows
if they exceed a block. Lines that are 4 KiB apart would share a set of the first-level cache."""
_PLANES_NEAR_NBYTES, _PLANES_FAR_NBYTES = 2048, 0 if _IS_SKYLAKE else 6144
"""The same of the planes kernel."""
_IS_INTEL = _MODEL[0] == "GenuineIntel"
_SHORT_NEAR_NBYTES = 1024 if _IS_INTEL else 0
"""The only distance for short rows of float32, which are read in address order. An AMD EPYC prefetches them alone, in
up to 7 % less time. A Xeon of model 167 takes a sixth less for 100 MB if they are prefetched."""
_PREFETCHES_SHORT_SUMS = _IS_INTEL
"""Whether short rows are prefetched while they are summed, too: 16-bit ones of 50 MB then take that Xeon a sixth less
time. Models 85 and 207 and EPYCs were not tried."""
_CACHE_NBYTES = max(machine.cache_nbytes(), 32 << 20)
"""What a tensor is measured against: some virtual machines hide the third-level cache."""
_FAR_FROM_NBYTES = min(_CACHE_NBYTES * 3 // 8, 96 << 20)
"""The size of tensors from which on they are prefetched to the second-level cache too: three of them then exceed the
cache, or the part of a larger one that a virtual machine may have. An AMD EPYC waits for few lines of memory in its
first-level cache; a Zen 4 then mostly takes a sixth to a third less time. A Xeon with a cache of 260 MiB reads smaller
ones from there, and would take 4 % longer. One with 480 MiB takes 1 to 2 % less time from 96 MiB on."""
_PLANES_FAR_FROM_NBYTES = min(_CACHE_NBYTES // 8, 32 << 20)
"""The size of channels-first tensors from which on their planes are prefetched at all: 4 MiB on a Zen 3 or Zen 4, which
then mostly take less time, by up to 30 %; 32 MiB on those Xeons, which would take up to 10 % longer below, and take up
to 27 % less above."""


class Geometry(NamedTuple):
    """The cut of a tensor. What affects the bits follows from shape and dtype, not from the channels to compute.

    Attributes:
        outer: `Spec.outer`, but 0 where inner is; channels and inner are the spec's.
        first: The first channel to compute.
        stop: The channel after the last one to compute.
        is_planes: Whether the planes kernel computes it.
        rows: Rows of the matrix, of which the last may be shorter; in the planes kernel, outer.
        columns: The length of a row.
        fold: How many rows of the tensor form a row of the matrix.
        last_fold: How many form the last row.
        is_short: Whether the sums of a row stay in registers over a band.
        span: How many neighbouring columns belong to one channel.
        groups: How many groups there are.
        group_channels: The channels of a group; the last group may have fewer.
        runs: How many runs of neighbouring columns form a group's part of a row: 1 or ``fold``.
        pitch: In the tables of a group, the distance of a channel's beginnings, in columns.
        padded: The columns of those tables, with each run rounded up to full vectors.
        tiles: The tiles of a group; in the planes kernel, outer_tiles * inner_tiles.
        outer_tiles: The number of runs that the planes are cut into.
        inner_tiles: The number of runs that each plane is cut into.
    """

    outer: int
    channels: int
    inner: int
    first: int
    stop: int
    is_planes: bool
    rows: int
    columns: int
    fold: int
    last_fold: int
    is_short: bool
    span: int
    groups: int
    group_channels: int
    runs: int
    pitch: int
    padded: int
    tiles: int
    outer_tiles: int
    inner_tiles: int


class Slot(NamedTuple):
    """The contents of a slot of the workspace, in rows as long as a group is wide.

    Attributes:
        tables: Rows of float32: coefficients.
        sums: Rows of float64: sums, of the group and of each tile.
    """

    tables: int
    sums: int

    def nbytes(self, cut: Geometry) -> int:
        """The size of the slot, in bytes."""
        return cut.padded * (4 * self.tables + 8 * self.sums * (cut.tiles + 1))


SLOTS = {1: Slot(tables=4, sums=2), 2: Slot(tables=11, sums=7)}
"""By the order of the gradients."""
_SCRATCH_ROWS = {1: 4, 2: 0}
"""The rows of float32 that each thread has for itself: sums of a band, and tables in another order. No two threads
share a page: a core prefetches up to its end, and would take from another core what that writes."""
PAGE_NBYTES = 4096

RECORD = np.dtype(
    [
        (name, np.int64)
        for name in (
            "y_backprop", "x", "x_backprop", "scale", "mean", "reserve_space_2", "scale_backprop", "offset_backprop",
            "grad_x_backprop", "grad_scale_backprop", "grad_offset_backprop", "grad_y_backprop", "grad_x", "grad_scale",
            "is_training", "is_inverse_std", "is_stats_bfloat16", "streams", "near", "far", "sums_near", "sums_far",
            "workspace", "slot_nbytes", "scratch", "scratch_nbytes", "order", *Slot._fields, *Geometry._fields,
        )
    ]
    + [("epsilon", np.float64)]
)  # fmt: skip
"""The description of a problem for the kernels: addresses, flags, geometry."""


class Plan(NamedTuple):
    """How a problem is computed, independent of the threads that compute it.

    Attributes:
        geometry: The cut.
        slot_nbytes: The size of a slot of the workspace, in bytes.
        scratch_nbytes: The size of the memory that each thread has for itself, in bytes.
        record: The bytes of a `RECORD`, to be completed with addresses.
    """

    geometry: Geometry
    slot_nbytes: int
    scratch_nbytes: int
    record: bytes


@functools.lru_cache(maxsize=4096)
def plan(spec: Spec, part: range | None = None) -> Plan:
    """Returns the plan of a problem, or of a part of its channels.

    Raises:
        ValueError: The channels are not contiguous or out of range.
    """
    part = range(spec.channels) if part is None else part
    if not (0 <= part.start <= part.stop <= spec.channels and part.step == 1):
        raise ValueError(f"channels must be neighbours in range(0, {spec.channels}), not {part}")
    cut, slot = geometry(spec, part), SLOTS[spec.order]
    near, far = _near(spec, cut), _far(spec, cut)
    sums_near, sums_far = (near, far) if _PREFETCHES_SHORT_SUMS or not cut.is_short else (0, 0)
    scratch_nbytes = -(-4 * _SCRATCH_ROWS[spec.order] * cut.padded // PAGE_NBYTES) * PAGE_NBYTES
    values = {
        "is_training": spec.is_training,
        "is_inverse_std": spec.reserve_space_2_kind is ReserveSpace2Kind.INVERSE_STD,
        "is_stats_bfloat16": spec.stats_dtype == BFLOAT16,
        "streams": _is_worth_streaming(spec, cut),
        "near": near,
        "far": far,
        "sums_near": sums_near,
        "sums_far": sums_far,
        "slot_nbytes": slot.nbytes(cut),
        "scratch_nbytes": scratch_nbytes,
        "epsilon": spec.epsilon,
        "order": spec.order,
        **slot._asdict(),
        **cut._asdict(),
    }
    record = np.zeros(1, RECORD)
    for name, value in values.items():
        record[name] = value
    return Plan(cut, slot.nbytes(cut), scratch_nbytes, record.tobytes())


def _is_worth_streaming(spec: Spec, cut: Geometry) -> bool:
    """Whether outputs that are aligned to a cache line should bypass the caches.

    They should if the tensor is large, and its planes are long or the part shares no cache line of a row with another.
    """
    itemsize = spec.dtype.itemsize
    from_nbytes = _STREAM_FROM_NBYTES[itemsize]
    if spec.order == 1 and spec.is_training:
        from_nbytes = max(from_nbytes, _STREAM_TRAINING_FROM_NBYTES)
    if spec.tensor_nbytes < from_nbytes:
        return False
    if cut.is_planes:
        return cut.inner >= _STREAM_PLANES_FROM
    edges = [cut.columns]
    if cut.stop - cut.first < cut.channels:
        edges = [channel * cut.inner for channel in (cut.first, cut.stop, cut.channels)]
    return all(edge * itemsize % _LINE_NBYTES == 0 for edge in edges)


def _near(spec: Spec, cut: Geometry) -> int:
    """The distance to what is prefetched to the first-level cache, in elements; 0 for none."""
    if cut.is_planes:
        return _PLANES_NEAR_NBYTES // spec.dtype.itemsize if spec.tensor_nbytes >= _PLANES_FAR_FROM_NBYTES else 0
    nbytes = _SHORT_NEAR_NBYTES if _is_short_float32(spec, cut) else _NEAR_NBYTES
    return _whole_pairs(cut, nbytes // spec.dtype.itemsize)


def _far(spec: Spec, cut: Geometry) -> int:
    """The distance to what is prefetched to the second-level cache, in elements; 0 for none."""
    if spec.tensor_nbytes < (_PLANES_FAR_FROM_NBYTES if cut.is_planes else _FAR_FROM_NBYTES):
        return 0
    if _is_short_float32(spec, cut):
        return 0
    if cut.is_planes:
        return _PLANES_FAR_NBYTES // spec.dtype.itemsize
    return _whole_pairs(cut, _FAR_NBYTES // spec.dtype.itemsize)


def _is_short_float32(spec: Spec, cut: Geometry) -> bool:
    return cut.is_short and spec.order == 1 and spec.dtype == FLOAT32


def _whole_pairs(cut: Geometry, elements: int) -> int:
    """A distance of the columns kernel, as whole pairs of rows if not all elements in between are computed."""
    own = cut.fold * cut.group_channels * cut.inner
    if own == cut.columns <= BLOCK:
        return elements
    return 2 * -(-elements // max(2 * own, 1)) * cut.columns


def geometry(spec: Spec, part: range) -> Geometry:
    """The cut of a part of the channels of a problem."""
    if spec.inner >= _PLANES_FROM or (spec.inner > LANES and spec.outer < 8):
        return _planes(spec.outer, spec.channels, spec.inner, part)
    return _columns(spec, part)


def _columns(spec: Spec, part: range) -> Geometry:
    channels, inner = spec.channels, spec.inner
    outer = spec.outer if inner else 0  # no row has elements then, however many there are
    width = channels * inner
    fold = min(_fold(width, spec.order), outer)
    rows = -(-outer // max(fold, 1))
    # The tiles are those of the whole tensor, whose groups may be wider than those of the part.
    widest = channels if inner == 1 or width < _MAX_LINES_COLUMNS else min(channels, _GROUP_CHANNELS)
    group = min(widest, len(part))
    runs = fold if fold > 1 and len(part) < channels else 1
    own = fold * group * inner
    return Geometry(
        outer, channels, inner, part.start, part.stop,
        is_planes=False,
        rows=rows,
        columns=fold * width,
        fold=fold,
        last_fold=outer - (rows - 1) * fold,
        is_short=_fold(width, spec.order) * width * spec.dtype.itemsize <= _SHORT_NBYTES,
        span=inner,
        groups=-(-len(part) // max(group, 1)),
        group_channels=group,
        runs=runs,
        pitch=group * inner if runs == 1 else _padded(group * inner),
        padded=runs * _padded(own // runs),
        tiles=_power_of_two(min(outer * widest * inner // _COLUMNS_TILE, rows // _TILE_ROWS)),
        outer_tiles=1,
        inner_tiles=1,
    )  # fmt: skip


def _fold(width: int, order: int) -> int:
    if not 0 < width < _MAX_LINES_COLUMNS:
        return 1
    lines, vectors = LINE // math.gcd(width, LINE), LANES // math.gcd(width, LANES)
    fold = lines * -(-_MIN_COLUMNS // (lines * width))
    if order == 1 and fold * width <= _MAX_LINES_COLUMNS:
        return fold
    return vectors * -(-_MAX_LINES_COLUMNS // (vectors * width))


def _planes(outer: int, channels: int, inner: int, part: range) -> Geometry:
    tiles = _power_of_two(outer * inner // _PLANES_TILE)
    outer_tiles = max(1, min(tiles, outer))
    inner_tiles = -(-tiles // outer_tiles)
    return Geometry(
        outer, channels, inner, part.start, part.stop,
        is_planes=True,
        rows=outer,
        columns=channels * inner,
        fold=1,
        last_fold=1,
        is_short=False,
        span=1,
        groups=len(part),
        group_channels=1,
        runs=1,
        pitch=1,
        padded=LANES,
        tiles=outer_tiles * inner_tiles,
        outer_tiles=outer_tiles,
        inner_tiles=inner_tiles,
    )  # fmt: skip


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def _power_of_two(wanted: int) -> int:
    """The largest power of two up to both ``wanted`` and `_MAX_TILES`; at least 1."""
    return 1 << max(0, min(wanted, _MAX_TILES).bit_length() - 1)
