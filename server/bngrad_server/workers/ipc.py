"""Where a request's tensors lie in shared memory; the front process and the workers agree on it here."""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bngrad_kernels.problem import AnyProblem, Array, GradGradProblem, Problem
from bngrad_kernels.spec import Spec
from bngrad_server.memory.arena import ALIGNMENT

ARENA = 0
"""The number of the arena; regions that are shared with clients have the numbers from 1 on."""

_PROBLEM_TYPES: dict[int, type[Problem] | type[GradGradProblem]] = {1: Problem, 2: GradGradProblem}
_SPEC_NUMBER = struct.Struct("<I")


def problem_type(spec: Spec) -> type[Problem] | type[GradGradProblem]:
    """The class of a spec's problems, which lists their tensors."""
    return _PROBLEM_TYPES[spec.order]


_LARGE = {order: problem.large_inputs + problem.large_outputs for order, problem in _PROBLEM_TYPES.items()}
_FORMATS = {len(names): struct.Struct(f"<I?q{2 * len(names)}q2q") for names in _LARGE.values()}
"""Packed tasks, by how many tensors of the shape of x they have."""


class Place(NamedTuple):
    """A place in shared memory: the number of the mapped memory, and where it begins there, in bytes."""

    memory: int
    offset: int


class Task(NamedTuple):
    """What a worker is told of a staged problem: what to compute, and where it lies.

    Attributes:
        has_scale: Whether scale is given, rather than ones.
        stats_offset: Where the block of the 1-D tensors begins in the arena: inputs, then outputs.
        places: Where the tensors of the shape of x lie: inputs, then outputs.
    """

    has_scale: bool
    stats_offset: int
    places: tuple[Place, ...]

    def pack(self, spec_number: int, channels: range) -> bytes:
        """The task as bytes, with the number by which the worker knows its spec, and the channels to compute."""
        has_scale, stats_offset, places = self
        numbers = itertools.chain.from_iterable(places)
        pack = _FORMATS[len(places)].pack
        return pack(spec_number, has_scale, stats_offset, *numbers, channels.start, channels.stop)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a request takes in the arena, in bytes: the 1-D tensors, then tensors of the shape of x.

    Attributes:
        stats: Each 1-D tensor.
        stats_stride: From one of them to the next.
        all_stats: All of them.
        tensor: Each tensor of the shape of x.
        tensor_stride: From one of them to the next.
    """

    stats: int
    stats_stride: int
    all_stats: int
    tensor: int
    tensor_stride: int

    @classmethod
    def of(cls, spec: Spec) -> Sizes:
        """The sizes for a spec."""
        problem = problem_type(spec)
        stride = _aligned(spec.stats_nbytes)
        count = len(problem.small_inputs) + len(problem.small_outputs)
        return cls(spec.stats_nbytes, stride, count * stride, spec.tensor_nbytes, _aligned(spec.tensor_nbytes))


def split_batch(packed: memoryview, specs: Mapping[int, Spec]) -> list[bytes]:
    """The packed tasks of a batch, which are all of one order."""
    (spec_number,) = _SPEC_NUMBER.unpack_from(packed)
    nbytes = _FORMATS[len(_LARGE[specs[spec_number].order])].size
    return [bytes(packed[start : start + nbytes]) for start in range(0, len(packed), nbytes)]


def unpack_problem(packed: bytes, specs: Mapping[int, Spec], memories: Mapping[int, mmap.mmap]) -> AnyProblem:
    """The problem of a packed task; its arrays are views of shared memory."""
    spec = specs[_SPEC_NUMBER.unpack_from(packed)[0]]
    problem, large = problem_type(spec), _LARGE[spec.order]
    _, has_scale, stats_offset, *places, first, last = _FORMATS[len(large)].unpack(packed)
    stride = _aligned(spec.stats_nbytes)
    arrays: dict[str, Array | None] = {}
    for i, name in enumerate(large):
        memory, offset = places[2 * i : 2 * i + 2]
        arrays[name] = _view(memories[memory], offset, spec.shape, spec.dtype)
    for i, name in enumerate(problem.small_inputs + problem.small_outputs):
        offset = stats_offset + i * stride
        arrays[name] = _view(memories[ARENA], offset, (spec.channels,), spec.stats_dtype)
    if not has_scale:
        arrays["scale"] = None
    channels = None if last - first == spec.channels else range(first, last)
    return problem(spec, **arrays, channels=channels)  # type: ignore[arg-type]


def _view(buffer: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.ndarray(shape, dtype, buffer, offset)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
