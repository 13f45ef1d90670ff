"""A problem: a valid spec with the arrays that a back end reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from bngrad_kernels.spec import Spec

Array: TypeAlias = npt.NDArray[Any]


@dataclass(eq=False, slots=True)
class Problem:
    """Inputs to read and outputs to write, all C-contiguous; no output overlaps an input.

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
        prepared: What a back end has worked out for it, and finds again when it runs it again.
    """

    spec: Spec
    y_backprop: Array
    x: Array
    scale: Array | None
    reserve_space_1: Array
    reserve_space_2: Array
    x_backprop: Array
    scale_backprop: Array
    offset_backprop: Array
    prepared: Any = None

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
            np.empty(spec.shape, spec.dtype),
            np.empty(spec.channels, spec.stats_dtype),
            np.empty(spec.channels, spec.stats_dtype),
        )
        return cls(spec, y_backprop, x, scale, reserve_space_1, reserve_space_2, *outputs)


class BackEnd(Protocol):
    """What computes problems on one device."""

    description: str
    """The device, in its maker's words."""

    def warm_up(self) -> None:
        """Compiles every kernel, or loads it from the disk cache, so that no request has to wait for that."""

    def run(self, problems: list[Problem]) -> None:
        """Writes the outputs of every problem. The bits depend on the problem alone, not on its companions."""
