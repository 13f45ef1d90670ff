"""Which engine computes a problem on which device, and what that means in traffic. All engines give the same bits.

Three tensors have to move in the first order: y_backprop and x in, x_backprop out; five in the second: grad_x_backprop,
y_backprop and x in, grad_y_backprop and grad_x out. In training the outputs depend on sums over all of their channel, so
that the inputs are needed a second time.

| problem | engine | second read from | tensors moved |
|---|---|---|---|
| inference | one pass | - | 3, 5 in the second order |
| first order, training; a group has at most 64 KiB | resident | shared memory | 3 |
| first order, training; a group fits shared memory, and there is one for each processor | resident | shared memory | 3 |
| training; a group and what is summed ahead of its second pass fit half of the second-level cache | streamed | cache | 3, 5 |
| training; everything else | streamed | memory, the end of a group from the cache | up to 5, 8 |

A group of the inputs is meant. Small groups are for one block, as it need not wait for others; larger ones only if
there are enough of them to keep all processors busy. A group that has vectors that cannot be loaded in one piece is
streamed, and so is one that shares a launch with a problem that is streamed. It is half of the cache, since each half of a large GPU's is nearer to half of its processors.
"""  # noqa: E501 - the table

from __future__ import annotations

import enum
from typing import NamedTuple

from bngrad_kernels.cuda.plan import VECTOR_NBYTES, Cut

INPUTS = {1: 2, 2: 3}
"""By the order: how many tensors a kernel reads."""
_SMALL_NBYTES = 64 << 10
STATIC_SHARED_NBYTES = 22 << 10
"""What a kernel has of shared memory beside what it keeps, rounded up by more than CUDA's own share of 1 KiB."""
_MOST_AHEAD_NBYTES = 8 << 20
_LEAST_AHEAD_SHARE = 16
"""The least that is summed ahead is this part of the cache: while a group is added up, others have to have work."""


class Traits(NamedTuple):
    """What matters of a device.

    Attributes:
        processors: How many multiprocessors it has.
        shared_nbytes: The most shared memory that a block can have.
        cache_nbytes: The size of the second-level cache.
    """

    processors: int
    shared_nbytes: int
    cache_nbytes: int


class Engine(enum.Enum):
    """How a problem is computed."""

    SINGLE = "one pass"
    RESIDENT = "resident"
    STREAMED = "streamed"


def choose(planned: Cut, channels: int, traits: Traits, *, is_training: bool, order: int = 1) -> Engine:
    """The engine for so many channels of a problem.

    Args:
        planned: How the problem is cut.
        channels: How many of its channels are computed at once.
        traits: The device.
        is_training: See `bngrad_kernels.spec.Spec`.
        order: Alike.
    """
    if not is_training:
        return Engine.SINGLE
    if order > 1:
        return Engine.STREAMED
    kept = kept_nbytes(planned)
    fits = kept <= most_kept_nbytes(traits)
    is_busy = kept <= _SMALL_NBYTES or planned.groups(channels) >= traits.processors
    is_resident = fits and is_busy and planned.rows > 0 and planned.is_vectorised(channels)
    return Engine.RESIDENT if is_resident else Engine.STREAMED


def most_kept_nbytes(traits: Traits) -> int:
    """The most that a block can keep in shared memory."""
    return max(0, traits.shared_nbytes - STATIC_SHARED_NBYTES)


def kept_nbytes(planned: Cut) -> int:
    """The shared memory that a group's y_backprop and x take."""
    return INPUTS[1] * planned.rows * planned.vectors * VECTOR_NBYTES


def is_read_from_cache(group_nbytes: int, cache_nbytes: int) -> bool:
    """Whether a streamed group should still be in the cache when it is read again.

    Args:
        group_nbytes: The size of what is read of it.
        cache_nbytes: The size of the second-level cache.
    """
    return group_nbytes + lookahead(group_nbytes, cache_nbytes) <= cache_nbytes // 2


def lookahead(group_nbytes: int, cache_nbytes: int) -> int:
    """How many bytes are summed between a group's sums and its second pass.

    Enough for nobody to wait until the group is added up, and little enough for it to be in the cache still.
    """
    least = cache_nbytes // _LEAST_AHEAD_SHARE
    return max(least, min(_MOST_AHEAD_NBYTES, cache_nbytes // 2 - group_nbytes))
