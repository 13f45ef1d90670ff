"""The specification of fused batch-norm gradients, and the one place that validates requests.

Three ops share one computation: TensorFlow's ``FusedBatchNormGradV3`` and ``FusedBatchNormGradV2``, and oneDNN
Graph's ``BatchNormTrainingBackprop``. Each ``*_spec`` function takes the headers of one op's inputs and its
attributes, and returns the `Spec` that all back ends understand.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
TENSOR_DTYPES = (FLOAT16, BFLOAT16, FLOAT32)


@dataclass(frozen=True, slots=True)
class DataFormat:
    """Where a tensor's channels are, and the ranks that go with it."""

    channels_last: bool
    ranks: tuple[int, ...]


V2_DATA_FORMATS: Mapping[str, DataFormat] = {
    "NHWC": DataFormat(channels_last=True, ranks=(4,)),
    "NCHW": DataFormat(channels_last=False, ranks=(4,)),
}
V3_DATA_FORMATS: Mapping[str, DataFormat] = {
    **V2_DATA_FORMATS,
    "NDHWC": DataFormat(channels_last=True, ranks=(5,)),
    "NCDHW": DataFormat(channels_last=False, ranks=(5,)),
}
ONEDNN_DATA_FORMATS: Mapping[str, DataFormat] = {
    "NXC": DataFormat(channels_last=True, ranks=(2, 3, 4, 5)),
    "NCX": DataFormat(channels_last=False, ranks=(2, 3, 4, 5)),
}


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
        dtype: The element type of y_backprop, x and x_backprop: float16, bfloat16 or float32.
        shape: The shape of y_backprop, x and x_backprop.
        channel_axis: The dimension of ``shape`` that holds the C channels.
        stats_dtype: The element type of the five 1-D tensors: float32, or bfloat16 beside a bfloat16 x.
        epsilon: What is added to the variance; rounded to float32, which is the attribute's type.
        is_training: Whether the mean and the variance depend on x.
        reserve_space_2_kind: What reserve_space_2 holds.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    channel_axis: int
    stats_dtype: np.dtype[Any] = FLOAT32
    epsilon: float = 1e-4
    is_training: bool = True
    reserve_space_2_kind: ReserveSpace2Kind = ReserveSpace2Kind.VARIANCE

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _float32(self.epsilon))

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
        """The size of each of y_backprop, x and x_backprop, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stats_nbytes(self) -> int:
        """The size of each of the 1-D tensors, in bytes."""
        return self.channels * self.stats_dtype.itemsize


def fused_batch_norm_grad_v3_spec(  # noqa: D417
    y_backprop: TensorHeader,
    x: TensorHeader,
    scale: TensorHeader,
    reserve_space_1: TensorHeader,
    reserve_space_2: TensorHeader,
    reserve_space_3: TensorHeader | None = None,
    *,
    epsilon: float = 1e-4,
    data_format: str = "NHWC",
    is_training: bool = True,
    reserve_space_2_kind: ReserveSpace2Kind = ReserveSpace2Kind.VARIANCE,
) -> Spec:
    """Validates a request for TensorFlow's ``FusedBatchNormGradV3``.

    Args:
        reserve_space_3: float32 of any shape. Its contents are ignored, so its payload may be empty.

    Raises:
        InvalidArgumentError: Names every field that does not meet the op's contract.
    """
    check = _Checker()
    if reserve_space_3 is not None:
        check.dtype("reserve_space_3", reserve_space_3, (FLOAT32,))
        if reserve_space_3.nbytes:
            check.payload("reserve_space_3", reserve_space_3)
    return _tensorflow_spec(
        check, V3_DATA_FORMATS, y_backprop, x, scale, reserve_space_1, reserve_space_2,
        epsilon, data_format, is_training, reserve_space_2_kind,
    )  # fmt: skip


def fused_batch_norm_grad_v2_spec(
    y_backprop: TensorHeader,
    x: TensorHeader,
    scale: TensorHeader,
    reserve_space_1: TensorHeader,
    reserve_space_2: TensorHeader,
    *,
    epsilon: float = 1e-4,
    data_format: str = "NHWC",
    is_training: bool = True,
    reserve_space_2_kind: ReserveSpace2Kind = ReserveSpace2Kind.VARIANCE,
) -> Spec:
    """Validates a request for TensorFlow's ``FusedBatchNormGradV2``.

    Raises:
        InvalidArgumentError: Names every field that does not meet the op's contract.
    """
    return _tensorflow_spec(
        _Checker(), V2_DATA_FORMATS, y_backprop, x, scale, reserve_space_1, reserve_space_2,
        epsilon, data_format, is_training, reserve_space_2_kind,
    )  # fmt: skip


def batch_norm_training_backprop_spec(
    input_forward: TensorHeader,
    output_delta: TensorHeader,
    mean: TensorHeader,
    variance: TensorHeader,
    gamma: TensorHeader | None = None,
    *,
    epsilon: float,
    data_format: str = "NXC",
) -> Spec:
    """Validates a request for oneDNN Graph's ``BatchNormTrainingBackprop``.

    Raises:
        InvalidArgumentError: Names every field that does not meet the op's contract.
    """
    check = _Checker()
    axis = check.tensors("input_forward", input_forward, "output_delta", output_delta, data_format, ONEDNN_DATA_FORMATS)
    stats_dtypes = (FLOAT32, BFLOAT16) if input_forward.dtype == BFLOAT16 else (FLOAT32,)
    check.stats("input_forward", input_forward, axis, stats_dtypes, mean=mean)
    check.stats("input_forward", input_forward, axis, (mean.dtype,), variance=variance)
    if gamma is not None:
        check.stats("input_forward", input_forward, axis, (mean.dtype,), gamma=gamma)
    check.epsilon(epsilon, zero_allowed=False)
    check.raise_violations()
    return Spec(input_forward.dtype, input_forward.shape, axis, mean.dtype, epsilon)


def _tensorflow_spec(
    check: _Checker,
    data_formats: Mapping[str, DataFormat],
    y_backprop: TensorHeader,
    x: TensorHeader,
    scale: TensorHeader,
    reserve_space_1: TensorHeader,
    reserve_space_2: TensorHeader,
    epsilon: float,
    data_format: str,
    is_training: bool,
    reserve_space_2_kind: ReserveSpace2Kind,
) -> Spec:
    axis = check.tensors("x", x, "y_backprop", y_backprop, data_format, data_formats)
    stats = {"scale": scale, "reserve_space_1": reserve_space_1, "reserve_space_2": reserve_space_2}
    check.stats("x", x, axis, (FLOAT32,), **stats)
    check.epsilon(epsilon, zero_allowed=True)
    check.raise_violations()
    return Spec(x.dtype, x.shape, axis, FLOAT32, epsilon, is_training, reserve_space_2_kind)


class _Checker:
    """Collects violations. Begins with TensorFlow's own words where it has a message, since users match on them."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def raise_violations(self) -> None:
        if self._violations:
            raise InvalidArgumentError(tuple(self._violations))

    def tensors(
        self,
        x_name: str,
        x: TensorHeader,
        dy_name: str,
        dy: TensorHeader,
        data_format: str,
        data_formats: Mapping[str, DataFormat],
    ) -> int:
        """Checks x, its gradient and the data format; returns the channel axis (0 where that cannot be known)."""
        self.dtype(x_name, x, TENSOR_DTYPES)
        self.dtype(dy_name, dy, (x.dtype,))
        self.payload(x_name, x)
        self.payload(dy_name, dy)
        if x.shape != dy.shape:
            self._add(
                dy_name,
                f"{x_name} and {dy_name} must have same shape, but {x_name} has shape {x.shape} and {dy_name} has "
                f"shape {dy.shape}",
            )
        layout = data_formats.get(data_format)
        if layout is None:
            self._add("data_format", f"data_format must be one of {', '.join(data_formats)}, not {data_format!r}")
            return 0
        if len(x.shape) not in layout.ranks:
            ranks = " or ".join(f"{rank}" for rank in layout.ranks)
            self._add(x_name, f"{x_name} must be {ranks}-dimensional for data_format {data_format}, not {x.shape}")
            return 0
        return len(x.shape) - 1 if layout.channels_last else 1

    def stats(
        self, x_name: str, x: TensorHeader, axis: int, dtypes: tuple[np.dtype[Any], ...], **stats: TensorHeader
    ) -> None:
        """Checks 1-D tensors of one element a channel; ``axis`` 0 means that x has no known channels."""
        for name, header in stats.items():
            self.dtype(name, header, dtypes)
            self.payload(name, header)
            if len(header.shape) != 1:
                self._add(name, f"{name} must be 1-dimensional, not {header.shape}")
            elif axis and header.shape[0] != x.shape[axis]:
                self._add(
                    name,
                    f"{name} must have the same number of elements as the channels of {x_name}, got "
                    f"{header.shape[0]} and {x.shape[axis]}",
                )

    def dtype(self, name: str, header: TensorHeader, dtypes: tuple[np.dtype[Any], ...]) -> None:
        if header.dtype not in dtypes:
            names = " or ".join(dtype.name for dtype in dtypes)
            self._add(name, f"{name} must have dtype {names}, not {header.dtype.name}")

    def payload(self, name: str, header: TensorHeader) -> None:
        if any(length < 0 for length in header.shape):
            self._add(name, f"{name} must have no negative dimension, not shape {header.shape}")
            return
        nbytes = math.prod(header.shape) * header.dtype.itemsize
        # An empty tensor's other dimensions count too: NumPy cannot describe it otherwise.
        if math.prod(max(length, 1) for length in header.shape) * header.dtype.itemsize >= 2**63:
            self._add(name, f"{name} must have fewer than 2**63 bytes, not shape {header.shape}")
        elif nbytes != header.nbytes:
            self._add(
                name,
                f"{name} must have {nbytes} bytes of data for shape {header.shape} and dtype {header.dtype.name}, "
                f"not {header.nbytes}",
            )

    def epsilon(self, epsilon: float, *, zero_allowed: bool) -> None:
        rounded = _float32(epsilon)
        if not (math.isfinite(rounded) and (rounded > 0 or (zero_allowed and rounded == 0))):
            bound = "not negative" if zero_allowed else "positive"
            self._add("epsilon", f"epsilon must be finite and {bound} in float32, not {epsilon}")

    def _add(self, field: str, description: str) -> None:
        self._violations.append(FieldViolation(field, description))


def _float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
