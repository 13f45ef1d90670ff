"""Selects the kernel for a problem on a device. All kernels give the same bits; they differ in memory traffic.

The first order has to move three tensors: y_backprop and x in, x_backprop out. The second order has to move five:
grad_x_backprop, y_backprop and x in, grad_y_backprop and grad_x out. In training the outputs depend on sums over the
whole channel, so the inputs are needed a second time.

| problem | kernel | second read from | tensors moved |
|---|---|---|---|
| inference | one pass | - | 3; second order 5 |
| first order, training; a group has at most 64 KiB | resident | shared memory | 3 |
| training; rows of more than 512 bytes | streamed, group by group | cache, if a group fits it | 3 to 5; 5 to 8 |
| training; shorter rows, as in most channels-last tensors | streamed, all groups together | cache, if all fit it | 3 to 5; 5 to 8 |

Sizes are those of a group's inputs. Small groups go to one block each, which then need not wait for others. Larger ones
would leave room for one block a multiprocessor, which reads, adds up and writes one after the other. A group is streamed
if its vectors cannot be loaded in one piece, or if another problem of the same launch has to be streamed. Only half of
the cache counts, since each half of a large GPU's cache is closer to half of its multiprocessors.
"""  # noqa: E501 - the table

from __future__ import annotations

import enum
from typing import NamedTuple

from bngrad_kernels.cuda.plan import VECTOR_NBYTES, Cut

INPUTS = {1: 2, 2: 3}
"""How many tensors a kernel reads, by order."""
_SMALL_NBYTES = 64 << 10
_SHORT_ROW_NBYTES = 512
STATIC_SHARED_NBYTES = 22 << 10
"""The static shared memory of a kernel, rounded up by more than CUDA's own share of 1 KiB."""
_MOST_AHEAD_NBYTES = 16 << 20
_LEAST_AHEAD_SHARE = 16
"""At least this part of the cache is summed ahead: while a group is finished, the other blocks need work."""


class Traits(NamedTuple):
    """The properties of a device that the choice of kernels depends on.

    Attributes:
        processors: How many multiprocessors it has.
        shared_nbytes: The maximum shared memory of a block.
        cache_nbytes: The size of the second-level cache.
    """

    processors: int
    shared_nbytes: int
    cache_nbytes: int


class KernelKind(enum.Enum):
    """How a kernel computes a problem."""

    SINGLE = "one pass"
    RESIDENT = "resident"
    STREAMED = "streamed"


def choose_kernel(planned: Cut, channels: int, traits: Traits, *, is_training: bool, order: int = 1) -> KernelKind:
    """Chooses the kernel for a problem of which this many channels are computed at once."""
    if not is_training:
        return KernelKind.SINGLE
    if order > 1:
        return KernelKind.STREAMED
    kept = resident_nbytes(planned)
    fits = kept <= min(_SMALL_NBYTES, most_resident_nbytes(traits))
    is_resident = fits and planned.rows > 0 and planned.is_vectorised(channels)
    return KernelKind.RESIDENT if is_resident else KernelKind.STREAMED


def most_resident_nbytes(traits: Traits) -> int:
    """The most that a block can hold in shared memory beside its static part."""
    return max(0, traits.shared_nbytes - STATIC_SHARED_NBYTES)


def resident_nbytes(planned: Cut) -> int:
    """The shared memory that a group's y_backprop and x take."""
    return INPUTS[1] * planned.rows * planned.vectors * VECTOR_NBYTES


def has_short_rows(planned: Cut) -> bool:
    """Whether the rows of a group are so short that memory is read slowly if its neighbours are not read as well."""
    return planned.group_channels * planned.inner * VECTOR_NBYTES <= _SHORT_ROW_NBYTES * planned.lanes


def lookahead(group_nbytes: int, cache_nbytes: int) -> int:
    """How many bytes are summed between a group's sums and its second pass.

    Enough that no block waits for the group to be finished, and few enough that the group is still in the cache.
    """
    least = cache_nbytes // _LEAST_AHEAD_SHARE
    return max(least, min(_MOST_AHEAD_NBYTES, cache_nbytes // 2 - group_nbytes))
