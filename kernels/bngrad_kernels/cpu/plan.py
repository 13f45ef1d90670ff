"""How a problem is cut into tiles, and the record that tells the kernels.

Both kernels share one shape of work. The channels are cut into groups; a group is independent of every other. The
elements of a group are cut into tiles, whose sums are added in the order of the tiles. Tiles and the order of
additions within them follow from the shape alone, hence so do the bits; which thread takes which tile does not
matter. The width of a group does not touch the bits either: no sum runs over more than one channel.

The columns kernel sees a matrix of ``rows`` x ``columns`` and sums down the columns. It takes channels-last tensors
and planes too small to fill vectors: there, each element of a plane is a column, and the columns of a channel are
added at the end. Where a row is short, ``fold`` consecutive rows count as one, so that its vectors are full. All
channels-last channels are one group.

The planes kernel sums along the planes of channels-first tensors, one channel a group.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from bngrad_kernels.spec import BFLOAT16, ReserveSpace2Kind, Spec

LANES = 16

_SHORT = 512
"""A row of the columns kernel has at least so many columns, where the tensor has."""
_GROUP_CHANNELS = 32
"""The channels of a group of small planes, for the second-level cache; a multiple of 32 keeps stores aligned."""
_PLANES_FROM = 128
"""Planes of at least so many elements are summed along, smaller ones are columns."""
_COLUMNS_TILE, _PLANES_TILE = 1 << 16, 1 << 14
"""The fewest elements of a tile, save for tensors that are smaller."""
_TILE_ROWS = 64
"""The fewest rows of a tile in the columns kernel, as each tile has its own sums of every column."""
_MAX_TILES = 64
_STREAM_FROM_NBYTES = 12 << 20
"""From this size on, x_backprop is written past the caches."""


class Geometry(NamedTuple):
    """The cut of a tensor, from its shape alone.

    Attributes:
        outer: See `Spec.outer`; so are channels and inner.
        is_planes: Which kernel.
        rows: Rows of the matrix, the last one perhaps shorter; in the planes kernel, outer.
        columns: The length of a row.
        last_columns: The length of the last row.
        fold: How often each channel begins in a row.
        span: How many columns in a run belong to one channel.
        groups: How many groups there are.
        group_channels: The channels of a group; the last one may have fewer.
        padded: The columns of a group, rounded up to full vectors.
        tiles: The tiles of a group; in the planes kernel, outer_tiles * inner_tiles.
        outer_tiles: Into how many runs the planes are cut.
        inner_tiles: Into how many runs each plane is cut.
    """

    outer: int
    channels: int
    inner: int
    is_planes: bool
    rows: int
    columns: int
    last_columns: int
    fold: int
    span: int
    groups: int
    group_channels: int
    padded: int
    tiles: int
    outer_tiles: int
    inner_tiles: int

    @property
    def slot_nbytes(self) -> int:
        """The size of a slot of the workspace: four tables, two rows of sums, and two of sums and chains a tile."""
        return self.padded * (4 * 4 + 2 * 8 + 2 * (8 + 4) * self.tiles)


RECORD = np.dtype(
    [
        (name, np.int64)
        for name in (
            "y_backprop", "x", "x_backprop", "scale", "mean", "reserve_space_2", "scale_backprop", "offset_backprop",
            "is_training", "is_inverse_std", "is_stats_bfloat16", "streams", "by_group", "workspace", "slot_nbytes",
            *Geometry._fields,
        )
    ]
    + [("epsilon", np.float64)]
)  # fmt: skip
"""What a kernel knows of a problem: addresses, flags, geometry."""


class Plan(NamedTuple):
    """How a problem is computed, whoever computes it.

    Attributes:
        geometry: The cut.
        record: The bytes of a `RECORD`, to be completed by `bngrad_kernels.cpu.driver.place`.
    """

    geometry: Geometry
    record: bytes


@functools.lru_cache(maxsize=4096)
def plan(spec: Spec) -> Plan:
    """The plan of a problem."""
    cut = geometry(spec.outer, spec.channels, spec.inner)
    values = {
        "is_training": spec.is_training,
        "is_inverse_std": spec.reserve_space_2_kind is ReserveSpace2Kind.INVERSE_STD,
        "is_stats_bfloat16": spec.stats_dtype == BFLOAT16,
        "streams": spec.tensor_nbytes >= _STREAM_FROM_NBYTES and cut.columns * spec.dtype.itemsize % 64 == 0,
        "slot_nbytes": cut.slot_nbytes,
        "epsilon": spec.epsilon,
        **cut._asdict(),
    }
    record = np.zeros(1, RECORD)
    for name, value in values.items():
        record[name] = value
    return Plan(cut, record.tobytes())


def geometry(outer: int, channels: int, inner: int) -> Geometry:
    """The cut of a tensor of (outer, channels, inner)."""
    if inner >= _PLANES_FROM or (inner > LANES and outer < 8):
        return _planes(outer, channels, inner)
    return _columns(outer, channels, inner)


def _columns(outer: int, channels: int, inner: int) -> Geometry:
    width = channels * inner
    fold = min(_fold(width), outer)
    rows = -(-outer // max(fold, 1))
    group = channels if inner == 1 or fold > 1 else min(channels, _GROUP_CHANNELS)
    return Geometry(
        outer, channels, inner,
        is_planes=False,
        rows=rows,
        columns=fold * width,
        last_columns=(outer - (rows - 1) * fold) * width,
        fold=fold,
        span=inner,
        groups=-(-channels // max(group, 1)),
        group_channels=group,
        padded=_padded(fold * group * inner),
        tiles=_power_of_two(min(outer * group * inner // _COLUMNS_TILE, rows // _TILE_ROWS)),
        outer_tiles=1,
        inner_tiles=1,
    )  # fmt: skip


def _fold(width: int) -> int:
    if not 0 < width < _SHORT:
        return 1
    full = LANES // math.gcd(width, LANES)
    return full * -(-_SHORT // (full * width))


def _planes(outer: int, channels: int, inner: int) -> Geometry:
    tiles = _power_of_two(outer * inner // _PLANES_TILE)
    outer_tiles = max(1, min(tiles, outer))
    inner_tiles = -(-tiles // outer_tiles)
    return Geometry(
        outer, channels, inner,
        is_planes=True,
        rows=outer,
        columns=channels * inner,
        last_columns=channels * inner,
        fold=1,
        span=1,
        groups=channels,
        group_channels=1,
        padded=LANES,
        tiles=outer_tiles * inner_tiles,
        outer_tiles=outer_tiles,
        inner_tiles=inner_tiles,
    )  # fmt: skip


def _padded(width: int) -> int:
    return -(-width // LANES) * LANES


def _power_of_two(wanted: int) -> int:
    """The largest power of two that is not above ``wanted`` nor `_MAX_TILES`; at least 1."""
    return 1 << max(0, min(wanted, _MAX_TILES).bit_length() - 1)
