"""Where a request's tensors lie in its block of the arena; the front process and the workers agree on it here."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import Spec
from bngrad_server.arena import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is told of a staged problem: what to compute, and where in the arena it lies."""

    spec: Spec
    offset: int
    has_scale: bool


def staged_nbytes(spec: Spec) -> int:
    """The size of the block that holds all inputs and outputs of a problem, in bytes."""
    return 3 * _aligned(spec.tensor_nbytes) + 5 * _aligned(spec.stats_nbytes)


def staged_problem(buffer: mmap.mmap, offset: int, spec: Spec, *, has_scale: bool) -> Problem:
    """The problem whose arrays are views of the block at ``offset``: three tensors, then five 1-D tensors."""
    tensor_step, stats_step = _aligned(spec.tensor_nbytes), _aligned(spec.stats_nbytes)

    def tensor(index: int) -> Array:
        return _view(buffer, offset + index * tensor_step, spec.shape, spec.dtype)

    def stats(index: int) -> Array:
        return _view(buffer, offset + 3 * tensor_step + index * stats_step, (spec.channels,), spec.stats_dtype)

    return Problem(
        spec,
        y_backprop=tensor(0),
        x=tensor(1),
        scale=stats(0) if has_scale else None,
        reserve_space_1=stats(1),
        reserve_space_2=stats(2),
        x_backprop=tensor(2),
        scale_backprop=stats(3),
        offset_backprop=stats(4),
    )


def _view(buffer: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.ndarray(shape, dtype, buffer, offset)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
