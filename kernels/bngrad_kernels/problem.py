"""Problems of the first and the second order: a valid spec with the arrays that a backend reads and writes."""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from bngrad_kernels.spec import Spec

Array: TypeAlias = npt.NDArray[Any]

_HEADER_NBYTES = object.__basicsize__
_LINE_NBYTES = 64
"""The size of a cache line."""
_LONG_NBYTES = 4096
"""Planes of at least this size may be split between any channels: a cache line that two parts share costs little."""


@dataclass(eq=False, slots=True)
class _Extent:
    """The part that both orders have in common."""

    spec: Spec
    channels: range | None = field(default=None, kw_only=True)
    prepared: Any = field(default=None, kw_only=True)
    on_device: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def channel_count(self) -> int:
        """The number of channels to compute."""
        return self.spec.channels if self.channels is None else len(self.channels)

    @property
    def tensor_nbytes(self) -> int:
        """The size, in bytes, of the computed channels of a tensor of the shape of x."""
        nbytes = self.spec.tensor_nbytes
        return nbytes if self.channels is None else nbytes // max(self.spec.channels, 1) * len(self.channels)


@dataclass(eq=False, slots=True)
class Problem(_Extent):
    """Inputs to read and outputs to write, all C-contiguous; no output overlaps an input.

    To compute only some channels, pass whole arrays and set `channels`. Only the elements of these channels are read
    and written, so other processes may compute the other channels at the same time. The bits are the same as when the
    whole is computed at once. `channel_cuts` returns suitable parts.

    Attributes:
        spec: What to compute; gives shape and dtype of every array.
        y_backprop: The gradient of the output, ``spec.shape`` of ``spec.dtype``.
        x: The input of the forward pass, of the same shape and dtype.
        scale: Shape (C,) of ``spec.stats_dtype``; None stands for ones.
        reserve_space_1: The mean, shape (C,) of ``spec.stats_dtype``.
        reserve_space_2: See ``spec.reserve_space_2_kind``, shape (C,) of ``spec.stats_dtype``.
        x_backprop: Written: the gradient of x, ``spec.shape`` of ``spec.dtype``.
        scale_backprop: Written: the gradient of scale, shape (C,) of ``spec.stats_dtype``.
        offset_backprop: Written: the gradient of offset, of the same shape and dtype.
        channels: The contiguous channels to compute; None stands for all.
        prepared: A backend's own data about the problem, kept here for its next run; to be reset to None when any of
            the above changes.
        on_device: What `bngrad_kernels.backend.Backend.copy_ahead` returned for large inputs, by their names.
    """

    large_inputs: ClassVar = ("y_backprop", "x")
    """The names of the inputs of the shape of x, in the order of the op's arguments. The next three are similar."""
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
        outputs = (_tensor(spec), np.empty(spec.channels, spec.stats_dtype), np.empty(spec.channels, spec.stats_dtype))
        return cls(spec, y_backprop, x, scale, reserve_space_1, reserve_space_2, *outputs)


@dataclass(eq=False, slots=True)
class GradGradProblem(_Extent):
    """A `Problem` of the second order.

    Attributes:
        spec: What to compute; gives shape and dtype of every array.
        grad_x_backprop: The gradient of x_backprop, ``spec.shape`` of ``spec.dtype``.
        grad_scale_backprop: The gradient of scale_backprop, shape (C,) of ``spec.stats_dtype``.
        grad_offset_backprop: The gradient of offset_backprop, of the same shape and dtype.
        y_backprop: As in `Problem`, and so are x and scale.
        reserve_space_1: The mean; ignored in training, where it follows from x.
        reserve_space_2: See ``spec.reserve_space_2_kind``; also ignored in training.
        grad_y_backprop: Written: the gradient of y_backprop, ``spec.shape`` of ``spec.dtype``.
        grad_x: Written: the gradient of x, of the same shape and dtype.
        grad_scale: Written: the gradient of scale, shape (C,) of ``spec.stats_dtype``.
        channels: As in `Problem`.
        prepared: As in `Problem`, and so is on_device.
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

PROBLEM_TYPES: dict[int, type[Problem] | type[GradGradProblem]] = {1: Problem, 2: GradGradProblem}
"""By the order of their specs."""


def problem_type(spec: Spec) -> type[Problem] | type[GradGradProblem]:
    """The class of a spec's problems, which lists their tensors."""
    return PROBLEM_TYPES[spec.order]


def address_of_array(array: Array) -> int:
    """Returns where an array's first element lies, ten times as fast as ``array.ctypes.data``.

    NumPy's public C structure of an array, ``PyArrayObject_fields``, begins with it, after the header of any object.
    """
    return ctypes.c_size_t.from_address(id(array) + _HEADER_NBYTES).value


def _tensor(spec: Spec) -> Array:
    """A new tensor, aligned to a cache line, which non-temporal stores of a CPU require."""
    memory = np.empty(spec.tensor_nbytes + _LINE_NBYTES, np.uint8)
    start = -address_of_array(memory) % _LINE_NBYTES
    return memory[start:][: spec.tensor_nbytes].view(spec.dtype).reshape(spec.shape)


def channel_cuts(spec: Spec, parts: int) -> list[range]:
    """Cuts the channels into parts of about the same size, for different workers.

    Each part begins at a cache line, so that no line is read twice or written by two workers. Hence there may be fewer
    parts than asked for, but at least one.
    """
    nbytes = spec.inner * spec.dtype.itemsize
    unit = 1 if nbytes >= _LONG_NBYTES else _LINE_NBYTES // math.gcd(_LINE_NBYTES, nbytes)
    units = -(-spec.channels // unit)
    parts = max(1, min(parts, units))
    cuts = [min(i * units // parts * unit, spec.channels) for i in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]
