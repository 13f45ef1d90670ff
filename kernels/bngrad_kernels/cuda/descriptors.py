"""What the kernels are told: a descriptor of each piece of a problem, and the tickets that they draw."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bngrad_kernels.cuda.kernel_selection import INPUTS, Engine, Traits, choose, kept_nbytes, lookahead
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
            "rows", "channels", "inner", "group_channels", "vectors", "sweep", "chain", "tiles", "strips", "parts",
            "row_gap", "is_inverse_std", "has_bfloat16_stats",
        )
    ]
    + [("epsilon", np.float64)]
)  # fmt: skip
"""``struct Descriptor`` of descriptor.cuh."""

TICKET = ("descriptor", "phase", "group", "strip")
"""``struct Ticket`` of descriptor.cuh: 32-bit integers."""
PIECE, PHASE, GROUP, STRIP = range(4)

SUM, APPLY, INFER, RESIDE = range(4)
"""``enum Phase`` of descriptor.cuh."""

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


class Kernel(NamedTuple):
    """Which kernel computes a piece."""

    order: int
    dtype: str
    engine: Engine
    is_vectorised: bool

    @property
    def symbol(self) -> str:
        """Its name in batch_norm_grad.cu."""
        order = {1: "first", 2: "second"}[self.order]
        mode = "inference" if self.engine is Engine.SINGLE else "training"
        access = "vectors" if self.is_vectorised else "elements"
        return f"{order}_{self.dtype}_{mode}_{'resident' if self.engine is Engine.RESIDENT else access}"


def every_kernel() -> Iterator[Kernel]:
    """All kernels of batch_norm_grad.cu."""
    for dtype in TENSOR_DTYPES:
        yield Kernel(1, dtype.name, Engine.RESIDENT, is_vectorised=True)
        for order, engine, access in itertools.product((1, 2), (Engine.STREAMED, Engine.SINGLE), (True, False)):
            yield Kernel(order, dtype.name, engine, access)


class Template(NamedTuple):
    """What all pieces of a spec and a width have in common.

    Attributes:
        cut: The cut of the whole problem.
        kernel: Which kernel computes them.
        groups: How many groups of channels they have.
        kept_nbytes: The shared memory that a block needs to keep a group in.
        partials_nbytes: The memory that the sums of strips take.
        coefficients_nbytes: The memory that the coefficients take.
        descriptor: The bytes of a `DESCRIPTOR` without pointers.
        tickets: The words of `TICKET`s of descriptor 0: where some apply, all that sum come before them.
        starts: For each ticket, how many bytes of the piece are to be summed before it may be drawn.
        group_nbytes: How many bytes are to be summed for a group.
    """

    cut: Cut
    kernel: Kernel
    groups: int
    kept_nbytes: int
    partials_nbytes: int
    coefficients_nbytes: int
    descriptor: bytes
    tickets: Array
    starts: Array
    group_nbytes: int


def template(piece: Piece, traits: Traits) -> Template:
    """The template of a piece on a device, kept for the next one alike."""
    return _template(piece.problem.spec, piece.channels, traits)


@functools.lru_cache(maxsize=1024)
def _template(spec: Spec, channels: int, traits: Traits) -> Template:
    planned = cut(spec)
    engine = choose(planned, channels, traits, is_training=spec.is_training, order=spec.order)
    kernel = Kernel(spec.order, spec.dtype.name, engine, planned.is_vectorised(channels))
    groups = planned.groups(channels)
    record = np.zeros(1, DESCRIPTOR)
    for name in ("rows", "inner", "group_channels", "vectors", "sweep", "chain", "tiles", "strips", "parts"):
        record[name] = getattr(planned, name)
    record["channels"] = channels
    record["row_gap"] = channels * planned.inner - planned.vectors * (planned.lanes if kernel.is_vectorised else 1)
    record["is_inverse_std"] = spec.reserve_space_2_kind is ReserveSpace2Kind.INVERSE_STD
    record["has_bfloat16_stats"] = spec.stats_dtype == BFLOAT16
    record["epsilon"] = spec.epsilon
    group_nbytes = INPUTS[spec.order] * planned.rows * planned.inner * planned.group_channels * spec.dtype.itemsize
    drawn, starts = _tickets(planned, engine, groups, group_nbytes)
    return Template(
        cut=planned,
        kernel=kernel,
        groups=groups,
        kept_nbytes=kept_nbytes(planned) if engine is Engine.RESIDENT else 0,
        partials_nbytes=groups * planned.group_channels * planned.strips * _SUMS[spec.order] * 8,
        coefficients_nbytes=groups * planned.group_channels * _QUADS[spec.order] * 16,
        descriptor=record.tobytes(),
        tickets=drawn,
        starts=starts,
        group_nbytes=group_nbytes,
    )


def _tickets(planned: Cut, engine: Engine, groups: int, group_nbytes: int) -> tuple[Array, Array]:
    strips = 1 if engine is Engine.RESIDENT else planned.strips
    group, strip = np.divmod(np.arange(groups * strips, dtype=np.int64), strips)
    first = np.zeros((groups * strips, len(TICKET)), np.int32)
    first[:, PHASE] = {Engine.SINGLE: INFER, Engine.RESIDENT: RESIDE, Engine.STREAMED: SUM}[engine]
    first[:, GROUP], first[:, STRIP] = group, strip
    starts = group * group_nbytes + strip * (group_nbytes // strips)
    if engine is not Engine.STREAMED or planned.rows == 0:
        return first, starts
    second = first.copy()
    second[:, PHASE] = APPLY
    second[:, STRIP] = strips - 1 - strip  # what was read last is the likeliest to be in the cache still
    return np.concatenate((first, second)), np.concatenate((starts, (group + 1) * group_nbytes))


def tickets(templates: Sequence[Template], descriptors: Sequence[int], cache_nbytes: int) -> Array:
    """The words of one launch's tickets, in the order in which they are drawn; no bit depends on it.

    Args:
        templates: Of the pieces that the launch computes.
        descriptors: The place of each one's descriptor.
        cache_nbytes: The size of the device's second-level cache.
    """
    drawn = np.concatenate([each.tickets for each in templates])
    lengths = [len(each.tickets) for each in templates]
    drawn[:, PIECE] = np.repeat(np.asarray(descriptors, np.int32), lengths)
    before = np.cumsum([0, *(each.groups * each.group_nbytes for each in templates[:-1])])
    delays = [lookahead(each.group_nbytes, cache_nbytes) for each in templates]
    starts = np.concatenate([each.starts for each in templates]) + np.repeat(before, lengths)
    starts += np.where(drawn[:, PHASE] == APPLY, np.repeat(delays, lengths), 0)
    # What applies is behind the sums it waits for: these start before their group's end, and the sort is stable.
    return drawn[np.argsort(starts, kind="stable")]
