"""A piece's arrays on the host, prepared for copies; a problem keeps them for its next run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from bngrad_kernels.cuda.chunks.layout import Footprint, footprint, is_small
from bngrad_kernels.cuda.descriptors import Piece
from bngrad_kernels.cuda.kernel_selection import Traits
from bngrad_kernels.problem import AnyProblem, Array, address_of_array

SmallRows: TypeAlias = memoryview | Array
"""The bytes of a small array: a view of one row, which is copied fastest, or several rows."""


class LargeRows(NamedTuple):
    """The bytes of a large array, as rows.

    Attributes:
        name: The array's name in the problem.
        rows: The rows.
        host: The address of the first byte.
    """

    name: str
    rows: Array
    host: int


class Prepared(NamedTuple):
    """A piece's arrays. Absent arrays are left out; the order is that of the footprint.

    It has no reference to its problem, which refers to it: both have to go with the last reference to the problem.

    Attributes:
        nbytes: See `device_nbytes`.
        footprint: What the chunk's layout depends on.
        small_inputs: The inputs that are gathered.
        large_inputs: The others, each copied on its own.
        small_outputs: The outputs that are scattered.
        large_outputs: The others.
    """

    nbytes: int
    footprint: Footprint
    small_inputs: Sequence[SmallRows]
    large_inputs: Sequence[LargeRows]
    small_outputs: Sequence[SmallRows]
    large_outputs: Sequence[LargeRows]


def prepare(piece: Piece, traits: Traits) -> Prepared:
    """Prepares a piece for a device with these traits; a problem keeps what was prepared for all of it."""
    problem = piece.problem
    known = problem.prepared
    channels = piece.channels
    if isinstance(known, Prepared) and known.footprint.channels == channels and known.footprint.traits == traits:
        return known
    inputs = _arrays(piece, problem.large_inputs, problem.small_inputs)
    outputs = _arrays(piece, problem.large_outputs, problem.small_outputs)
    sizes = (tuple((name, rows.size) for name, rows in arrays) for arrays in (inputs, outputs))
    made = Prepared(
        channels * channel_nbytes(problem),
        footprint(problem.spec, channels, traits, *sizes),
        *_by_size(inputs),
        *_by_size(outputs),
    )
    if channels == problem.channel_count:
        problem.prepared = made
    return made


def device_nbytes(problem: AnyProblem) -> int:
    """The device memory of a problem's arrays, without descriptors, work tiles and scratch memory."""
    known = problem.prepared
    return known.nbytes if isinstance(known, Prepared) else problem.channel_count * channel_nbytes(problem)


def channel_nbytes(problem: AnyProblem) -> int:
    """The same for one channel."""
    spec = problem.spec
    tensors, vectors = problem.large_inputs + problem.large_outputs, problem.small_inputs + problem.small_outputs
    return len(tensors) * spec.elements_per_channel * spec.dtype.itemsize + len(vectors) * spec.stats_dtype.itemsize


def _arrays(piece: Piece, large: Sequence[str], small: Sequence[str]) -> list[tuple[str, Array]]:
    """The bytes of a problem's arrays that belong to a piece, as rows; absent arrays are left out."""
    tensors = [(name, _tensor_rows(piece, getattr(piece.problem, name))) for name in large]
    vectors = [(name, getattr(piece.problem, name)) for name in small]
    return tensors + [(name, _stats_row(piece, vector)) for name, vector in vectors if vector is not None]


def _tensor_rows(piece: Piece, tensor: Array) -> Array:
    """A piece's bytes of a tensor: one row per index before the channel axis, or a single row if there are no gaps."""
    spec = piece.problem.spec
    flat = tensor.reshape(-1).view(np.uint8)
    if piece.channels == spec.channels:
        return flat.reshape(1, -1)
    nbytes = spec.inner * spec.dtype.itemsize
    rows = flat.reshape(spec.outer, spec.channels * nbytes)
    return rows[:, piece.first * nbytes : piece.last * nbytes]


def _stats_row(piece: Piece, stats: Array) -> Array:
    return stats[piece.first : piece.last].view(np.uint8).reshape(1, -1)


def _by_size(arrays: Sequence[tuple[str, Array]]) -> tuple[list[SmallRows], list[LargeRows]]:
    """Small arrays, and large ones."""
    small = [rows[0].data if len(rows) == 1 else rows for _, rows in arrays if is_small(rows.size)]
    large = [LargeRows(name, rows, address_of_array(rows)) for name, rows in arrays if not is_small(rows.size)]
    return small, large
