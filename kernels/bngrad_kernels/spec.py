"""The spec: what a backend has to compute, in the same terms for every op."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
TENSOR_DTYPES = (FLOAT16, BFLOAT16, FLOAT32)


class ReserveSpace2Kind(enum.Enum):
    """What ``reserve_space_2`` holds."""

    VARIANCE = "variance"
    """The variance without epsilon: ``rstd = 1 / sqrt(reserve_space_2 + epsilon)``."""
    INVERSE_STD = "inverse_std"
    """``rstd`` itself; epsilon is then unused."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor's dtype, shape and size, without its elements.

    Attributes:
        dtype: The element type.
        shape: The length of each dimension, outermost first.
        nbytes: The length of the payload, in bytes.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> TensorHeader:
        """The header of an array."""
        return cls(array.dtype, array.shape, array.nbytes)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One invalid field of a request, with its value and what is expected."""

    field: str
    description: str


class InvalidArgumentError(ValueError):
    """An invalid request, which must not reach a backend.

    Attributes:
        violations: All invalid fields, at least one.
    """

    def __init__(self, violations: tuple[FieldViolation, ...]) -> None:
        super().__init__("; ".join(violation.description for violation in violations))
        self.violations = violations


@dataclass(frozen=True, slots=True)
class Spec:
    """What to compute, valid and independent of the op that asked for it.

    Attributes:
        dtype: The element type of x and of every tensor of its shape: float16, bfloat16 or float32.
        shape: The shape of x and of every tensor of its shape.
        channel_axis: The dimension of ``shape`` that holds the C channels.
        stats_dtype: The element type of the 1-D tensors: float32, or bfloat16 beside a bfloat16 x.
        epsilon: Added to the variance; rounded to float32, the type of the op's attribute.
        is_training: Whether the mean and the variance depend on x.
        reserve_space_2_kind: What reserve_space_2 holds.
        order: 1 for the gradients of batch normalisation, 2 for the gradients of those gradients.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    channel_axis: int
    stats_dtype: np.dtype[Any] = FLOAT32
    epsilon: float = 1e-4
    is_training: bool = True
    reserve_space_2_kind: ReserveSpace2Kind = ReserveSpace2Kind.VARIANCE
    order: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", float32(self.epsilon))

    @property
    def channels(self) -> int:
        """C, the number of channels."""
        return self.shape[self.channel_axis]

    @property
    def outer(self) -> int:
        """The number of elements before the channel axis: in memory, x is (outer, C, inner)."""
        return math.prod(self.shape[: self.channel_axis])

    @property
    def inner(self) -> int:
        """The number of elements after the channel axis; 1 if channels come last."""
        return math.prod(self.shape[self.channel_axis + 1 :])

    @property
    def elements_per_channel(self) -> int:
        """M, the number of elements that each channel's sums run over."""
        return self.outer * self.inner

    @property
    def tensor_nbytes(self) -> int:
        """The size of each tensor of the shape of x, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stats_nbytes(self) -> int:
        """The size of each of the 1-D tensors, in bytes."""
        return self.channels * self.stats_dtype.itemsize


def float32(value: float) -> float:
    """The value rounded to float32, the type of the attribute epsilon; never -0.0, which caches take for 0.0."""
    with np.errstate(over="ignore"):
        return float(np.float32(value)) + 0.0
