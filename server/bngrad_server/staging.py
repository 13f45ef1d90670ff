"""Where a request's tensors lie in shared memory; the front process and the workers agree on it here."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import Spec
from bngrad_server.arena import ALIGNMENT

ARENA = 0
"""The number of the arena; regions that are shared with clients have the numbers from 1 on."""

SCALE, RESERVE_SPACE_1, RESERVE_SPACE_2, SCALE_BACKPROP, OFFSET_BACKPROP = range(5)
"""The order of the 1-D tensors in the arena."""
_FORMAT = struct.Struct("<I?q6q2q")
TASK_NBYTES = _FORMAT.size
"""The size of a packed task."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in shared memory: the number of the mapped memory, and where it begins there, in bytes."""

    memory: int
    offset: int


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is told of a staged problem: what to compute, and where it lies.

    Attributes:
        has_scale: Whether scale is given, rather than ones.
        stats_offset: Where the block of the five 1-D tensors begins in the arena.
        y_backprop: Where y_backprop lies, as for the others.
    """

    has_scale: bool
    stats_offset: int
    y_backprop: Place
    x: Place
    x_backprop: Place

    def pack(self, spec_number: int, channels: range) -> bytes:
        """The task as bytes, with the number by which the worker knows its spec, and the channels to compute."""
        y, x, dx = self.y_backprop, self.x, self.x_backprop
        return _FORMAT.pack(
            *(spec_number, self.has_scale, self.stats_offset),
            *(y.memory, y.offset, x.memory, x.offset, dx.memory, dx.offset),
            *(channels.start, channels.stop),
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a request takes in the arena, in bytes: five 1-D tensors, then up to three of the shape of x.

    Attributes:
        stats: Each 1-D tensor: scale, reserve_space_1, reserve_space_2, scale_backprop, offset_backprop.
        stats_stride: From one of them to the next.
        tensor: Each tensor of the shape of x.
        tensor_stride: From one of them to the next.
    """

    stats: int
    stats_stride: int
    tensor: int
    tensor_stride: int

    @classmethod
    def of(cls, spec: Spec) -> Sizes:
        """The sizes for a spec."""
        return cls(spec.stats_nbytes, _aligned(spec.stats_nbytes), spec.tensor_nbytes, _aligned(spec.tensor_nbytes))


def unpack_problem(packed: bytes, specs: Mapping[int, Spec], memories: Mapping[int, mmap.mmap]) -> Problem:
    """The problem of a packed task; its arrays are views of shared memory."""
    spec_number, has_scale, stats_offset, *places, first, last = _FORMAT.unpack(packed)
    spec = specs[spec_number]
    stride = _aligned(spec.stats_nbytes)
    shape, dtype = (spec.channels,), spec.stats_dtype

    def tensor(index: int) -> Array:
        memory, offset = places[2 * index : 2 * index + 2]
        return _view(memories[memory], offset, spec.shape, spec.dtype)

    def stats(index: int) -> Array:
        return _view(memories[ARENA], stats_offset + index * stride, shape, dtype)

    return Problem(
        spec,
        y_backprop=tensor(0),
        x=tensor(1),
        scale=stats(SCALE) if has_scale else None,
        reserve_space_1=stats(RESERVE_SPACE_1),
        reserve_space_2=stats(RESERVE_SPACE_2),
        x_backprop=tensor(2),
        scale_backprop=stats(SCALE_BACKPROP),
        offset_backprop=stats(OFFSET_BACKPROP),
        channels=None if last - first == spec.channels else range(first, last),
    )


def _view(buffer: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.ndarray(shape, dtype, buffer, offset)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
