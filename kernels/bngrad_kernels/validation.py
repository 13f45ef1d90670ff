"""Validates requests: turns the inputs and attributes of each op into a `Spec`, or says what is wrong with them.

Three ops share one computation: TensorFlow's ``FusedBatchNormGradV3`` and ``FusedBatchNormGradV2``, and oneDNN
Graph's ``BatchNormTrainingBackprop``. A fourth is the gradient of TensorFlow's two. Each ``*_spec`` function takes the
headers of one op's inputs and its attributes, and returns the `Spec` that all backends understand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bngrad_kernels.spec import (
    BFLOAT16,
    FLOAT32,
    TENSOR_DTYPES,
    FieldViolation,
    InvalidArgumentError,
    ReserveSpace2Kind,
    Spec,
    TensorHeader,
    float32,
)


@dataclass(frozen=True, slots=True)
class DataFormat:
    """Where a tensor's channels are, and its possible ranks."""

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
    data_formats: Mapping[str, DataFormat] = V3_DATA_FORMATS,
) -> Spec:
    """Validates a request for TensorFlow's ``FusedBatchNormGradV3``.

    Args:
        reserve_space_3: float32 of any shape. Its contents are ignored, so its payload may be empty.
        data_formats: The formats that are allowed.

    Raises:
        InvalidArgumentError: Names every field that does not meet the op's contract.
    """
    check = _Checker()
    if reserve_space_3 is not None:
        check.dtype("reserve_space_3", reserve_space_3, (FLOAT32,))
        if reserve_space_3.nbytes:
            check.payload("reserve_space_3", reserve_space_3)
    axis = check.tensors("x", x, data_format, data_formats, y_backprop=y_backprop)
    stats = {"scale": scale, "reserve_space_1": reserve_space_1, "reserve_space_2": reserve_space_2}
    check.stats("x", x, axis, (FLOAT32,), **stats)
    check.epsilon(epsilon, zero_allowed=True)
    check.raise_violations()
    return Spec(x.dtype, x.shape, axis, FLOAT32, epsilon, is_training, reserve_space_2_kind)


fused_batch_norm_grad_v2_spec = functools.partial(fused_batch_norm_grad_v3_spec, data_formats=V2_DATA_FORMATS)
"""Validates a request for TensorFlow's ``FusedBatchNormGradV2``: as above, but 4-D only and without reserve_space_3."""


def batch_norm_training_backprop_spec(
    input_forward: TensorHeader,
    output_delta: TensorHeader,
    mean: TensorHeader,
    variance: TensorHeader,
    gamma: TensorHeader | None = None,
    *,
    epsilon: float,
    data_format: str = "NXC",
    variance_kind: ReserveSpace2Kind = ReserveSpace2Kind.VARIANCE,
) -> Spec:
    """Validates a request for oneDNN Graph's ``BatchNormTrainingBackprop``.

    Raises:
        InvalidArgumentError: Names every field that does not meet the op's contract.
    """
    check = _Checker()
    axis = check.tensors("input_forward", input_forward, data_format, ONEDNN_DATA_FORMATS, output_delta=output_delta)
    stats_dtypes = (FLOAT32, BFLOAT16) if input_forward.dtype == BFLOAT16 else (FLOAT32,)
    check.stats("input_forward", input_forward, axis, stats_dtypes, mean=mean)
    same = (mean.dtype,) if mean.dtype in stats_dtypes else stats_dtypes
    check.stats("input_forward", input_forward, axis, same, variance=variance)
    if gamma is not None:
        check.stats("input_forward", input_forward, axis, same, gamma=gamma)
    check.epsilon(epsilon, zero_allowed=False)
    check.raise_violations()
    return Spec(input_forward.dtype, input_forward.shape, axis, mean.dtype, epsilon, reserve_space_2_kind=variance_kind)


def fused_batch_norm_grad_grad_spec(
    grad_x_backprop: TensorHeader,
    grad_scale_backprop: TensorHeader,
    grad_offset_backprop: TensorHeader,
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
    """Validates a request for the gradient of TensorFlow's ``FusedBatchNormGradV3`` or ``FusedBatchNormGradV2``.

    Raises:
        InvalidArgumentError: Names every field that does not meet the op's contract.
    """
    check = _Checker()
    others = {"y_backprop": y_backprop, "grad_x_backprop": grad_x_backprop}
    axis = check.tensors("x", x, data_format, V3_DATA_FORMATS, **others)
    check.stats(
        "x", x, axis, (FLOAT32,), scale=scale, reserve_space_1=reserve_space_1, reserve_space_2=reserve_space_2,
        grad_scale_backprop=grad_scale_backprop, grad_offset_backprop=grad_offset_backprop,
    )  # fmt: skip
    check.epsilon(epsilon, zero_allowed=True)
    check.raise_violations()
    return Spec(x.dtype, x.shape, axis, FLOAT32, epsilon, is_training, reserve_space_2_kind, order=2)


class _Checker:
    """Collects violations. A description begins with TensorFlow's own message if it has one: users match on it."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def raise_violations(self) -> None:
        if self._violations:
            raise InvalidArgumentError(tuple(self._violations))

    def tensors(
        self,
        x_name: str,
        x: TensorHeader,
        data_format: str,
        data_formats: Mapping[str, DataFormat],
        **others: TensorHeader,
    ) -> int:
        """Checks x, the other tensors of its shape and the data format. Returns the channel axis, 0 if unknown."""
        self.dtype(x_name, x, TENSOR_DTYPES)
        self.payload(x_name, x)
        same = (x.dtype,) if x.dtype in TENSOR_DTYPES else TENSOR_DTYPES
        for name, header in others.items():
            self.dtype(name, header, same)
            self.payload(name, header)
            if x.shape != header.shape:
                has = f"{x_name} has shape {x.shape} and {name} has shape {header.shape}"
                self._add(name, f"{x_name} and {name} must have same shape, but {has}")
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
        """Checks 1-D tensors with one element per channel; ``axis`` is 0 if the channel axis of x is unknown."""
        for name, header in stats.items():
            self.dtype(name, header, dtypes)
            self.payload(name, header)
            if len(header.shape) != 1:
                self._add(name, f"{name} must be 1-dimensional, not {header.shape}")
            elif axis and header.shape[0] != x.shape[axis]:
                got = f"got {header.shape[0]} and {x.shape[axis]}"
                self._add(name, f"{name} must have the same number of elements as the channels of {x_name}, {got}")

    def dtype(self, name: str, header: TensorHeader, dtypes: tuple[np.dtype[Any], ...]) -> None:
        if header.dtype not in dtypes:
            names = " or ".join(dtype.name for dtype in dtypes)
            self._add(name, f"{name} must have dtype {names}, not {header.dtype.name}")

    def payload(self, name: str, header: TensorHeader) -> None:
        if any(length < 0 for length in header.shape):
            self._add(name, f"{name} must have no negative dimension, not shape {header.shape}")
            return
        nbytes = math.prod(header.shape) * header.dtype.itemsize
        # Zeros count as ones: NumPy cannot represent an empty tensor whose other dimensions overflow.
        if math.prod(max(length, 1) for length in header.shape) * header.dtype.itemsize >= 2**63:
            self._add(name, f"{name} must have fewer than 2**63 bytes, not shape {header.shape}")
        elif nbytes != header.nbytes:
            kind = f"shape {header.shape} and dtype {header.dtype.name}"
            self._add(name, f"{name} must have {nbytes} bytes of data for {kind}, not {header.nbytes}")

    def epsilon(self, epsilon: float, *, zero_allowed: bool) -> None:
        rounded = float32(epsilon)
        if not (math.isfinite(rounded) and (rounded > 0 or (zero_allowed and rounded == 0))):
            bound = "not negative" if zero_allowed else "positive"
            self._add("epsilon", f"epsilon must be finite and {bound} in float32, not {epsilon}")

    def _add(self, field: str, description: str) -> None:
        self._violations.append(FieldViolation(field, description))
