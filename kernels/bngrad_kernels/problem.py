"""A problem: a valid spec with the arrays that a back end reads and writes; of the first order or the second."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from bngrad_kernels.spec import Spec

Array: TypeAlias = npt.NDArray[Any]

_LINE_NBYTES = 64
"""The size of a cache line."""
_LONG_NBYTES = 4096
"""Planes of at least this size may be cut off anywhere: a line that two parts share does not matter there."""


@dataclass(eq=False, slots=True)
class _Extent:
    """What there is to compute, of whichever order."""

    spec: Spec
    channels: range | None = field(default=None, kw_only=True)
    prepared: Any = field(default=None, kw_only=True)

    @property
    def channel_count(self) -> int:
        """How many channels are to be computed."""
        return self.spec.channels if self.channels is None else len(self.channels)

    @property
    def tensor_nbytes(self) -> int:
        """The size of what is to be computed of a tensor of the shape of x, in bytes."""
        nbytes = self.spec.tensor_nbytes
        return nbytes if self.channels is None else nbytes // max(self.spec.channels, 1) * len(self.channels)


@dataclass(eq=False, slots=True)
class Problem(_Extent):
    """Inputs to read and outputs to write, all C-contiguous; no output overlaps an input.

    Where only a part of the channels is to be computed, the arrays are still those of the whole, and only the elements
    of these channels are read and written: other processes may write the others at the same time. The bits are those
    of the whole computed at once. `channel_cuts` gives good parts.

    Attributes:
        spec: What to compute; gives shape and dtype of every array.
        y_backprop: The gradient of the output, ``spec.shape`` of ``spec.dtype``.
        x: The input of the forward pass, alike.
        scale: Shape (C,) of ``spec.stats_dtype``; None counts as ones.
        reserve_space_1: The mean, shape (C,) of ``spec.stats_dtype``.
        reserve_space_2: See ``spec.reserve_space_2_kind``, shape (C,) of ``spec.stats_dtype``.
        x_backprop: Written: the gradient of x, ``spec.shape`` of ``spec.dtype``.
        scale_backprop: Written: the gradient of scale, shape (C,) of ``spec.stats_dtype``.
        offset_backprop: Written: the gradient of offset, alike.
        channels: The neighbouring channels to compute; None counts as all.
        prepared: What a back end has worked out for it, and finds again when it runs it again.
    """

    large_inputs: ClassVar = ("y_backprop", "x")
    """The names of the inputs of the shape of x, in the order of the ops' arguments; alike for the next ones."""
    small_inputs: ClassVar = ("scale", "reserve_space_1", "reserve_space_2")
    large_outputs: ClassVar = ("x_backprop",)
    small_outputs: ClassVar = ("scale_backprop", "offset_backprop")

    y_backprop: Array
    x: Array
    scale: Array | None
    reserve_space_1: Array
    reserve_space_2: Array
    x_backprop: Array
    scale_backprop: Array
    offset_backprop: Array

    @classmethod
    def allocate(
        cls,
        spec: Spec,
        y_backprop: Array,
        x: Array,
        scale: Array | None,
        reserve_space_1: Array,
        reserve_space_2: Array,
    ) -> Problem:
        """A problem with the given inputs and newly allocated outputs."""
        outputs = (
            _tensor(spec),
            np.empty(spec.channels, spec.stats_dtype),
            np.empty(spec.channels, spec.stats_dtype),
        )
        return cls(spec, y_backprop, x, scale, reserve_space_1, reserve_space_2, *outputs)


@dataclass(eq=False, slots=True)
class GradGradProblem(_Extent):
    """As `Problem`, of the second order.

    Attributes:
        spec: What to compute; gives shape and dtype of every array.
        grad_x_backprop: The gradient of x_backprop, ``spec.shape`` of ``spec.dtype``.
        grad_scale_backprop: The gradient of scale_backprop, shape (C,) of ``spec.stats_dtype``.
        grad_offset_backprop: The gradient of offset_backprop, alike.
        y_backprop: As in `Problem`, and so are the next ones.
        reserve_space_1: The mean; ignored in training, where it follows from x.
        reserve_space_2: See ``spec.reserve_space_2_kind``; ignored in training alike.
        grad_y_backprop: Written: the gradient of y_backprop, ``spec.shape`` of ``spec.dtype``.
        grad_x: Written: the gradient of x, alike.
        grad_scale: Written: the gradient of scale, shape (C,) of ``spec.stats_dtype``.
        channels: As in `Problem`, and so is the next one.
        prepared: As there.
    """

    large_inputs: ClassVar = ("grad_x_backprop", "y_backprop", "x")
    small_inputs: ClassVar = (
        "grad_scale_backprop", "grad_offset_backprop", "scale", "reserve_space_1", "reserve_space_2",
    )  # fmt: skip
    large_outputs: ClassVar = ("grad_y_backprop", "grad_x")
    small_outputs: ClassVar = ("grad_scale",)

    grad_x_backprop: Array
    grad_scale_backprop: Array
    grad_offset_backprop: Array
    y_backprop: Array
    x: Array
    scale: Array
    reserve_space_1: Array
    reserve_space_2: Array
    grad_y_backprop: Array
    grad_x: Array
    grad_scale: Array

    @classmethod
    def allocate(
        cls,
        spec: Spec,
        grad_x_backprop: Array,
        grad_scale_backprop: Array,
        grad_offset_backprop: Array,
        y_backprop: Array,
        x: Array,
        scale: Array,
        reserve_space_1: Array,
        reserve_space_2: Array,
    ) -> GradGradProblem:
        """A problem with the given inputs and newly allocated outputs."""
        return cls(
            spec, grad_x_backprop, grad_scale_backprop, grad_offset_backprop, y_backprop, x, scale,
            reserve_space_1, reserve_space_2,
            grad_y_backprop=_tensor(spec),
            grad_x=_tensor(spec),
            grad_scale=np.empty(spec.channels, spec.stats_dtype),
        )  # fmt: skip


AnyProblem: TypeAlias = Problem | GradGradProblem


class Backend(Protocol):
    """What computes problems on one device."""

    description: str
    """The device, in its maker's words."""
    memory_nbytes: int
    """The size of the device's own memory; 0 where it computes in the host's."""

    @property
    def used_nbytes(self) -> int:
        """How much of the device's own memory it has taken; for any thread."""

    def register(self, memory: Array) -> None:
        """Makes memory of the host, in which problems will lie, as fast to reach as the device can."""

    def unregister(self, memory: Array) -> None:
        """Undoes `register`, before the memory is given back."""

    def warm_up(self) -> None:
        """Compiles every kernel, or loads it from the disk cache, so that no request has to wait for that."""

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Writes the outputs of every problem. The bits depend on the problem alone, not on its companions.

        Raises:
            DeviceFailedError: This process cannot use the device any more.
        """


def _tensor(spec: Spec) -> Array:
    """A new tensor that begins with a cache line, as it has to for a CPU to write it past its caches."""
    memory = np.empty(spec.tensor_nbytes + _LINE_NBYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_NBYTES
    return memory[start:][: spec.tensor_nbytes].view(spec.dtype).reshape(spec.shape)


def channel_cuts(spec: Spec, parts: int) -> list[range]:
    """Cuts the channels into parts to be computed by different workers, each of about the same size.

    The parts begin where a cache line does, so that no line is read twice or written by two workers. So there are fewer
    than ``parts`` where there are not enough channels; and there is at least one.
    """
    nbytes = spec.inner * spec.dtype.itemsize
    unit = 1 if nbytes >= _LONG_NBYTES else _LINE_NBYTES // math.gcd(_LINE_NBYTES, nbytes)
    units = -(-spec.channels // unit)
    parts = max(1, min(parts, units))
    cuts = [min(i * units // parts * unit, spec.channels) for i in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]
