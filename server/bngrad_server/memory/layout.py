"""Where the tensors of a request lie in shared memory: what the front process and the workers agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bngrad_kernels.problem import problem_type
from bngrad_kernels.spec import Spec

ALIGNMENT = 256
"""Every block of the arena, and every tensor in it, begins at a multiple of this, in bytes."""
ARENA = 0
"""The number of the arena; regions that are shared with clients have the numbers from 1 on."""


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Place(NamedTuple):
    """A place in shared memory.

    Attributes:
        memory: The number of the mapped memory.
        offset: The offset there, in bytes.
        ahead: The number of the tensor there if a GPU may have a copy of it already; 0 otherwise.
    """

    memory: int
    offset: int
    ahead: int = 0


class Task(NamedTuple):
    """Where the tensors of a staged request lie.

    Attributes:
        has_scale: Whether scale is given, rather than ones.
        stats_offset: Where the block of the 1-D tensors begins in the arena: inputs, then outputs.
        places: Where the tensors of the shape of x lie: inputs, then outputs.
    """

    has_scale: bool
    stats_offset: int
    places: tuple[Place, ...]


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
        stride = aligned(spec.stats_nbytes)
        count = len(problem.small_inputs) + len(problem.small_outputs)
        return cls(spec.stats_nbytes, stride, count * stride, spec.tensor_nbytes, aligned(spec.tensor_nbytes))
