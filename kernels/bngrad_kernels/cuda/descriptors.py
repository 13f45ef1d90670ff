"""The input of the kernels beside tensors: a descriptor for each piece of a problem, and the work tiles of a launch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bngrad_kernels.cuda.kernel_selection import (
    INPUTS,
    KernelKind,
    Traits,
    choose_kernel,
    has_short_rows,
    lookahead,
    resident_nbytes,
)
from bngrad_kernels.cuda.plan import Cut, cut
from bngrad_kernels.problem import AnyProblem, Array
from bngrad_kernels.spec import BFLOAT16, TENSOR_DTYPES, ReserveSpace2Kind, Spec

POINTERS = (
    "grad_x_backprop", "y_backprop", "x", "grad_scale_backprop", "grad_offset_backprop", "scale", "reserve_space_1",
    "reserve_space_2", "x_backprop", "scale_backprop", "offset_backprop", "grad_y_backprop", "grad_x", "grad_scale",
    "partials", "coefficients", "arrived", "ready",
)  # fmt: skip
DESCRIPTOR = np.dtype(
    [(name, np.uint64) for name in POINTERS]
    + [
        (name, np.int64)
        for name in (
            "rows", "channels", "inner", "group_channels", "vectors", "sweep", "tiles", "parts", "sections",
            "row_gap", "slots", "tile_slots", "tile_steps", "tile_rows", "row_step", "vector_step", "index_step",
            "parts_shift", "inner_reciprocal", "vectors_reciprocal", "is_inverse_std", "has_bfloat16_stats",
        )
    ]
    + [("epsilon", np.float64)]
)  # fmt: skip
"""The fields of ``struct Descriptor`` of descriptor.cuh."""

WORK_TILE = ("descriptor", "phase", "group", "tile")
"""The 32-bit integers of ``struct WorkTile`` of descriptor.cuh."""
DESCRIPTOR_INDEX, PHASE, GROUP, TILE = range(4)
"""Their indices."""

SUM, APPLY, INFER, RESIDE = range(4)
"""``enum Phase`` of descriptor.cuh."""

_RECIPROCAL_BITS = 20
"""``kReciprocalBits`` of descriptor.cuh."""
_SECTION_TILES = 32
"""``kSectionTiles`` of descriptor.cuh."""
_SUMS, _QUADS = {1: 2, 2: 7}, {1: 1, 2: 3}
"""``kSums`` and ``kQuads`` by the order; fewer are used in inference."""


class Piece(NamedTuple):
    """The channels from ``first`` up to ``last``, exclusive, of a problem."""

    problem: AnyProblem
    first: int
    last: int

    @property
    def channels(self) -> int:
        """How many channels it has."""
        return self.last - self.first


class KernelVariant(NamedTuple):
    """One of the kernels of batch_norm_grad.cu."""

    order: int
    dtype: str
    kind: KernelKind
    is_vectorised: bool

    @property
    def symbol(self) -> str:
        """Its function name."""
        order = {1: "first", 2: "second"}[self.order]
        mode = "inference" if self.kind is KernelKind.SINGLE else "training"
        access = "vectors" if self.is_vectorised else "elements"
        return f"{order}_{self.dtype}_{mode}_{'resident' if self.kind is KernelKind.RESIDENT else access}"


def every_kernel() -> Iterator[KernelVariant]:
    """All kernels of batch_norm_grad.cu."""
    for dtype in TENSOR_DTYPES:
        yield KernelVariant(1, dtype.name, KernelKind.RESIDENT, is_vectorised=True)
        for order, kind, access in itertools.product((1, 2), (KernelKind.STREAMED, KernelKind.SINGLE), (True, False)):
            yield KernelVariant(order, dtype.name, kind, access)


class Template(NamedTuple):
    """The common part of all pieces with the same spec and number of channels.

    Attributes:
        cut: The cut of the whole problem.
        kernel: The kernel that computes them.
        groups: How many groups of channels they have.
        resident_nbytes: The shared memory that a block needs to hold a group; 0 unless the kernel is resident.
        partials_nbytes: The size of the sums of tiles and of sections of tiles.
        arrived_counters: How many numbers count tiles and sections that are summed.
        coefficients_nbytes: The size of the coefficients.
        descriptor: The bytes of a `DESCRIPTOR` without pointers.
        work_tiles: The `WORK_TILE`s, for descriptor 0; those that apply come after all that sum.
        starts: For each work tile, how many bytes of the piece are summed before it starts.
        group_nbytes: How many bytes are summed for a group.
    """

    cut: Cut
    kernel: KernelVariant
    groups: int
    resident_nbytes: int
    partials_nbytes: int
    arrived_counters: int
    coefficients_nbytes: int
    descriptor: bytes
    work_tiles: Array
    starts: Array
    group_nbytes: int


@functools.lru_cache(maxsize=1024)
def template(spec: Spec, channels: int, traits: Traits) -> Template:
    """The template of pieces of that many channels on a device; cached."""
    planned = cut(spec)
    kind = choose_kernel(planned, channels, traits, is_training=spec.is_training, order=spec.order)
    kernel = KernelVariant(spec.order, spec.dtype.name, kind, planned.is_vectorised(channels))
    groups = planned.groups(channels)
    record = np.zeros(1, DESCRIPTOR)
    for name in ("rows", "inner", "group_channels", "vectors", "sweep", "tile_steps", "tiles", "parts"):
        record[name] = getattr(planned, name)
    record["channels"] = channels
    sections = record["sections"] = -(-planned.tiles // _SECTION_TILES)
    for name, value in _steps(planned, channels, planned.lanes if kernel.is_vectorised else 1).items():
        record[name] = value
    record["is_inverse_std"] = spec.reserve_space_2_kind is ReserveSpace2Kind.INVERSE_STD
    record["has_bfloat16_stats"] = spec.stats_dtype == BFLOAT16
    record["epsilon"] = spec.epsilon
    group_nbytes = INPUTS[spec.order] * planned.rows * planned.inner * planned.group_channels * spec.dtype.itemsize
    work_tiles, starts = _work_tiles_of(planned, kind, groups, group_nbytes)
    return Template(
        cut=planned,
        kernel=kernel,
        groups=groups,
        resident_nbytes=resident_nbytes(planned) if kind is KernelKind.RESIDENT else 0,
        partials_nbytes=groups * (planned.tiles + sections) * planned.group_channels * _SUMS[spec.order] * 8,
        arrived_counters=groups * (sections + 1),
        coefficients_nbytes=groups * planned.group_channels * _QUADS[spec.order] * 16,
        descriptor=record.tobytes(),
        work_tiles=work_tiles,
        starts=starts,
        group_nbytes=group_nbytes,
    )


def _steps(planned: Cut, channels: int, stride: int) -> dict[str, int]:
    """What follows from the cut; ``stride`` elements lie between the first lanes of two vectors."""
    row_length = channels * planned.inner
    row_step, vector_step = divmod(planned.sweep, planned.vectors)
    return {
        "row_gap": row_length - planned.vectors * stride,
        "slots": planned.rows * planned.vectors,
        "tile_slots": planned.tile_steps * planned.sweep,
        "tile_rows": planned.tile_steps * row_step if planned.group_channels > 1 else 0,
        "row_step": row_step,
        "vector_step": vector_step,
        "index_step": row_step * row_length + vector_step * stride,
        "parts_shift": planned.parts.bit_length() - 1,
        "inner_reciprocal": -(-(1 << _RECIPROCAL_BITS) // planned.inner),
        "vectors_reciprocal": -(-(1 << _RECIPROCAL_BITS) // max(1, planned.vectors)),
    }


def _work_tiles_of(planned: Cut, kind: KernelKind, groups: int, group_nbytes: int) -> tuple[Array, Array]:
    """A piece's work tiles, and how many bytes of it are summed before each starts.

    Groups with short rows take turns tile by tile, one half of the groups after the other, as their neighbours are read
    from the same pages of memory. They are applied once all are summed; other groups once each of them is.
    """
    tiles = 1 if kind is KernelKind.RESIDENT else planned.tiles
    takes_turns = has_short_rows(planned)
    together = -(-groups // 2) if takes_turns else 1
    group, tile = np.divmod(np.arange(groups * tiles, dtype=np.int64), tiles)
    order = np.lexsort((group, tile, group // together))
    group, tile = group[order], tile[order]
    sums = np.zeros((groups * tiles, len(WORK_TILE)), np.int32)
    sums[:, PHASE] = {KernelKind.SINGLE: INFER, KernelKind.RESIDENT: RESIDE, KernelKind.STREAMED: SUM}[kind]
    sums[:, GROUP], sums[:, TILE] = group, tile
    starts = np.arange(groups * tiles, dtype=np.int64) * (group_nbytes // tiles)
    if kind is not KernelKind.STREAMED or planned.rows == 0:
        return sums, starts
    applies = sums.copy()
    applies[:, PHASE] = APPLY
    applies[:, TILE] = tiles - 1 - tile  # the data read last is the most likely to be in the cache still
    ends = np.full_like(group, groups) if takes_turns else group + 1
    return np.concatenate((sums, applies)), np.concatenate((starts, ends * group_nbytes))


def schedule_tiles(templates: Sequence[Template], descriptors: Sequence[int], cache_nbytes: int) -> Array:
    """Returns the work tiles of one launch, given the index of each piece's descriptor.

    They are in scheduling order, on which no bit depends.
    """
    work_tiles = np.concatenate([each.work_tiles for each in templates])
    lengths = [len(each.work_tiles) for each in templates]
    work_tiles[:, DESCRIPTOR_INDEX] = np.repeat(np.asarray(descriptors, np.int32), lengths)
    before = np.cumsum([0, *(each.groups * each.group_nbytes for each in templates[:-1])])
    delays = [lookahead(each.group_nbytes, cache_nbytes) for each in templates]
    starts = np.concatenate([each.starts for each in templates]) + np.repeat(before, lengths)
    starts += np.where(work_tiles[:, PHASE] == APPLY, np.repeat(delays, lengths), 0)
    # A tile that applies comes after the sums it waits for: those start before their group's end; the sort is stable.
    return work_tiles[np.argsort(starts, kind="stable")]
