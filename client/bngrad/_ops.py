"""The calls of the service without their transport: arguments to request bytes, response bytes to results."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from bngrad import _codec
from bngrad._arrays import as_arrays
from bngrad._errors import FieldViolation, invalid_argument
from bngrad._results import BatchNormTrainingBackprop, FusedBatchNormGradV2, FusedBatchNormGradV3, ServerInfo
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["BatchNormGradService"].full_name

_RESERVE_SPACE_2_KINDS: Mapping[str, pb.ReserveSpace2Kind] = {
    "variance": pb.RESERVE_SPACE2_KIND_VARIANCE,
    "inverse_std": pb.RESERVE_SPACE2_KIND_INVERSE_STD,
}

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """A call that any channel can make.

    Attributes:
        method: The path of the gRPC method.
        request: The message to send.
        read: Makes the result from the message that comes back.
    """

    method: str
    request: bytes
    read: Callable[[bytes], Result]


def fused_batch_norm_grad_v3(
    y_backprop: Any,
    x: Any,
    scale: Any,
    reserve_space_1: Any,
    reserve_space_2: Any,
    reserve_space_3: Any,
    epsilon: float,
    data_format: str,
    is_training: bool,
    reserve_space_2_kind: str,
) -> Call[FusedBatchNormGradV3]:
    """The call of `bngrad.Client.fused_batch_norm_grad_v3`."""
    attributes = _tensorflow_attributes(epsilon, data_format, is_training, reserve_space_2_kind)
    tensors = as_arrays(
        {
            "y_backprop": y_backprop,
            "x": x,
            "scale": scale,
            "reserve_space_1": reserve_space_1,
            "reserve_space_2": reserve_space_2,
            **({} if reserve_space_3 is None else {"reserve_space_3": reserve_space_3}),
        }
    )
    # The op ignores what reserve_space_3 holds, so its elements stay at home.
    headers = {field: tensors.pop(field) for field in ("reserve_space_3",) if field in tensors}
    return Call(
        f"/{_SERVICE}/FusedBatchNormGradV3",
        _codec.encode(pb.FusedBatchNormGradV3Request, tensors, attributes, headers=headers),
        lambda data: FusedBatchNormGradV3(**_codec.decode_tensors(pb.FusedBatchNormGradV3Response, data)),
    )


def fused_batch_norm_grad_v2(
    y_backprop: Any,
    x: Any,
    scale: Any,
    reserve_space_1: Any,
    reserve_space_2: Any,
    epsilon: float,
    data_format: str,
    is_training: bool,
    reserve_space_2_kind: str,
) -> Call[FusedBatchNormGradV2]:
    """The call of `bngrad.Client.fused_batch_norm_grad_v2`."""
    attributes = _tensorflow_attributes(epsilon, data_format, is_training, reserve_space_2_kind)
    tensors = as_arrays(
        {
            "y_backprop": y_backprop,
            "x": x,
            "scale": scale,
            "reserve_space_1": reserve_space_1,
            "reserve_space_2": reserve_space_2,
        }
    )
    return Call(
        f"/{_SERVICE}/FusedBatchNormGradV2",
        _codec.encode(pb.FusedBatchNormGradV2Request, tensors, attributes),
        lambda data: FusedBatchNormGradV2(**_codec.decode_tensors(pb.FusedBatchNormGradV2Response, data)),
    )


def batch_norm_training_backprop(
    input_forward: Any, output_delta: Any, mean: Any, variance: Any, gamma: Any, epsilon: float, data_format: str
) -> Call[BatchNormTrainingBackprop]:
    """The call of `bngrad.Client.batch_norm_training_backprop`."""
    attributes = {"epsilon": _epsilon(epsilon), "data_format": _data_format(data_format)}
    tensors = as_arrays(
        {
            "input_forward": input_forward,
            "output_delta": output_delta,
            "mean": mean,
            "variance": variance,
            **({} if gamma is None else {"gamma": gamma}),
        }
    )
    return Call(
        f"/{_SERVICE}/BatchNormTrainingBackprop",
        _codec.encode(pb.BatchNormTrainingBackpropRequest, tensors, attributes),
        lambda data: BatchNormTrainingBackprop(**_codec.decode_tensors(pb.BatchNormTrainingBackpropResponse, data)),
    )


def server_info() -> Call[ServerInfo]:
    """The call of `bngrad.Client.server_info`."""
    return Call(f"/{_SERVICE}/ServerInfo", _codec.encode_server_info_request(), _codec.decode_server_info)


def _tensorflow_attributes(
    epsilon: float, data_format: str, is_training: bool, reserve_space_2_kind: str
) -> dict[str, Any]:
    if not isinstance(is_training, bool | np.bool_):
        raise TypeError(f"is_training must be a bool, not {is_training!r}")
    return {
        "epsilon": _epsilon(epsilon),
        "data_format": _data_format(data_format),
        "is_training": bool(is_training),
        "reserve_space_2_kind": _reserve_space_2_kind(reserve_space_2_kind),
    }


def _epsilon(epsilon: float) -> float:
    """Rounds epsilon to float32, which is what the attribute is; protobuf would silently make 1e39 infinite."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, numbers.Real):
        raise TypeError(f"epsilon must be a number, not {epsilon!r}")
    try:
        with np.errstate(over="ignore"):
            rounded = float(np.float32(float(epsilon)))
    except OverflowError:  # An int that is too large for a float may be too long to print.
        rounded = epsilon = math.inf
    if not math.isfinite(rounded):
        raise invalid_argument(FieldViolation("epsilon", f"epsilon must be finite in float32, not {epsilon}"))
    return rounded


def _data_format(data_format: str) -> str:
    if not isinstance(data_format, str):
        raise TypeError(f"data_format must be a str, not {data_format!r}")
    return data_format


def _reserve_space_2_kind(kind: str) -> pb.ReserveSpace2Kind:
    if not isinstance(kind, str):
        raise TypeError(f"reserve_space_2_kind must be a str, not {kind!r}")
    if kind not in _RESERVE_SPACE_2_KINDS:
        names = " or ".join(f"{name!r}" for name in _RESERVE_SPACE_2_KINDS)
        description = f"reserve_space_2_kind must be {names}, not {kind!r}"
        raise invalid_argument(FieldViolation("reserve_space_2_kind", description))
    return _RESERVE_SPACE_2_KINDS[kind]
