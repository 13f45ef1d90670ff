"""What back ends compute: the terms that every op's request is put in, whichever op it came from."""

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
    """What is known of a tensor before its elements are looked at.

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
    """One thing wrong with a request: the field, and what it has and should have."""

    field: str
    description: str


class InvalidArgumentError(ValueError):
    """A request that no back end may see.

    Attributes:
        violations: Everything that is wrong with it, at least one.
    """

    def __init__(self, violations: tuple[FieldViolation, ...]) -> None:
        super().__init__("; ".join(violation.description for violation in violations))
        self.violations = violations


@dataclass(frozen=True, slots=True)
class Spec:
    """A valid problem, whichever op it came from.

    Attributes:
        dtype: The element type of x and of every tensor of its shape: float16, bfloat16 or float32.
        shape: The shape of x, of its gradients and of theirs.
        channel_axis: The dimension of ``shape`` that holds the C channels.
        stats_dtype: The element type of the 1-D tensors: float32, or bfloat16 beside a bfloat16 x.
        epsilon: What is added to the variance; rounded to float32, which is the attribute's type.
        is_training: Whether the mean and the variance depend on x.
        reserve_space_2_kind: What reserve_space_2 holds.
        order: 1 for the gradients of batch normalisation, 2 for the gradients of these.
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
        """The number of elements behind the channel axis; 1 where channels come last."""
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
    """The value rounded to float32, which is what the attribute epsilon is."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))
