"""Between the protocol's messages and the engine's requests and results."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.message import Message

from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FieldViolation,
    InvalidArgumentError,
    ReserveSpace2Kind,
    Spec,
    TensorHeader,
    batch_norm_training_backprop_spec,
    fused_batch_norm_grad_v2_spec,
    fused_batch_norm_grad_v3_spec,
)
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.engine import Request

_DTYPES: dict[pb.DataType, np.dtype[Any]] = {
    pb.DATA_TYPE_FLOAT16: FLOAT16,
    pb.DATA_TYPE_BFLOAT16: BFLOAT16,
    pb.DATA_TYPE_FLOAT32: FLOAT32,
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}

_RESERVE_SPACE_2_KINDS = {
    pb.RESERVE_SPACE2_KIND_UNSPECIFIED: ReserveSpace2Kind.VARIANCE,
    pb.RESERVE_SPACE2_KIND_VARIANCE: ReserveSpace2Kind.VARIANCE,
    pb.RESERVE_SPACE2_KIND_INVERSE_STD: ReserveSpace2Kind.INVERSE_STD,
}

_TENSORFLOW_INPUTS = ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2")

_EMPTY = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[0])


def read_v3_request(message: pb.FusedBatchNormGradV3Request) -> Request:
    """Validates a message.

    Raises:
        InvalidArgumentError: Names every field that does not meet the op's contract.
    """
    headers = _headers(message, *_TENSORFLOW_INPUTS, optional="reserve_space_3")
    spec = fused_batch_norm_grad_v3_spec(**headers, **_tensorflow_attributes(message))
    return _tensorflow_request(message, spec)


def read_v2_request(message: pb.FusedBatchNormGradV2Request) -> Request:
    """Validates a message, as `read_v3_request` does."""
    headers = _headers(message, *_TENSORFLOW_INPUTS)
    spec = fused_batch_norm_grad_v2_spec(**headers, **_tensorflow_attributes(message))
    return _tensorflow_request(message, spec)


def read_onednn_request(message: pb.BatchNormTrainingBackpropRequest) -> Request:
    """Validates a message, as `read_v3_request` does."""
    headers = _headers(message, "input_forward", "output_delta", "mean", "variance", optional="gamma")
    if not message.HasField("epsilon"):
        raise InvalidArgumentError((FieldViolation("epsilon", "epsilon must be given: it has no default"),))
    attributes = _attributes(message, "epsilon", "data_format")
    spec = batch_norm_training_backprop_spec(**headers, **attributes)
    return Request(
        spec,
        y_backprop=_tensor(message.output_delta, spec.shape, spec.dtype),
        x=_tensor(message.input_forward, spec.shape, spec.dtype),
        scale=_stats(message.gamma, spec) if message.HasField("gamma") else None,
        reserve_space_1=_stats(message.mean, spec),
        reserve_space_2=_stats(message.variance, spec),
    )


def v3_response(problem: Problem) -> pb.FusedBatchNormGradV3Response:
    """The answer, with the outputs copied out of the problem."""
    return pb.FusedBatchNormGradV3Response(
        x_backprop=_message(problem.x_backprop),
        scale_backprop=_message(problem.scale_backprop),
        offset_backprop=_message(problem.offset_backprop),
        reserve_space_4=_EMPTY,
        reserve_space_5=_EMPTY,
    )


def v2_response(problem: Problem) -> pb.FusedBatchNormGradV2Response:
    """The answer, with the outputs copied out of the problem."""
    return pb.FusedBatchNormGradV2Response(
        x_backprop=_message(problem.x_backprop),
        scale_backprop=_message(problem.scale_backprop),
        offset_backprop=_message(problem.offset_backprop),
        reserve_space_3=_EMPTY,
        reserve_space_4=_EMPTY,
    )


def onednn_response(problem: Problem) -> pb.BatchNormTrainingBackpropResponse:
    """The answer, with the outputs copied out of the problem."""
    return pb.BatchNormTrainingBackpropResponse(
        input_delta=_message(problem.x_backprop),
        gamma_delta=_message(problem.scale_backprop),
        beta_delta=_message(problem.offset_backprop),
    )


def _headers(message: Message, *required: str, optional: str = "") -> dict[str, Any]:
    """The headers of a message's tensors; an optional one is left out where the message has none."""
    violations = []
    headers = {}
    for name in [*required, optional] if optional and message.HasField(optional) else required:
        tensor = getattr(message, name)
        if not message.HasField(name):
            violations.append(FieldViolation(name, f"{name} must be given"))
        elif tensor.dtype not in _DTYPES:
            known = ", ".join(map(_data_type_name, _DTYPES))
            description = f"{name} must have one of the dtypes {known}, not {_data_type_name(tensor.dtype)}"
            violations.append(FieldViolation(name, description))
        else:
            headers[name] = TensorHeader(_DTYPES[tensor.dtype], tuple(tensor.shape), len(tensor.data))
    if violations:
        raise InvalidArgumentError(tuple(violations))
    return headers


def _data_type_name(data_type: pb.DataType) -> str:
    """The name of a data type, or the number of one that this version does not know."""
    return pb.DataType.Name(data_type) if data_type in pb.DataType.values() else str(data_type)


def _attributes(message: Message, *names: str) -> dict[str, Any]:
    """The attributes that a message has; the op's defaults, which the spec functions know, are left out."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _tensorflow_attributes(
    message: pb.FusedBatchNormGradV3Request | pb.FusedBatchNormGradV2Request,
) -> dict[str, Any]:
    attributes = _attributes(message, "epsilon", "data_format", "is_training")
    kind = _RESERVE_SPACE_2_KINDS.get(message.reserve_space_2_kind)
    if kind is None:
        description = f"reserve_space_2_kind must be a known ReserveSpace2Kind, not {message.reserve_space_2_kind}"
        raise InvalidArgumentError((FieldViolation("reserve_space_2_kind", description),))
    return {**attributes, "reserve_space_2_kind": kind}


def _tensorflow_request(
    message: pb.FusedBatchNormGradV3Request | pb.FusedBatchNormGradV2Request, spec: Spec
) -> Request:
    return Request(
        spec,
        y_backprop=_tensor(message.y_backprop, spec.shape, spec.dtype),
        x=_tensor(message.x, spec.shape, spec.dtype),
        scale=_stats(message.scale, spec),
        reserve_space_1=_stats(message.reserve_space_1, spec),
        reserve_space_2=_stats(message.reserve_space_2, spec),
    )


def _tensor(tensor: pb.Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The elements of a tensor that was validated, as a view."""
    return np.ndarray(shape, dtype, tensor.data)


def _stats(tensor: pb.Tensor, spec: Spec) -> Array:
    return _tensor(tensor, (spec.channels,), spec.stats_dtype)


def _message(array: Array) -> pb.Tensor:
    return pb.Tensor(dtype=_DATA_TYPES[array.dtype], shape=array.shape, data=array.tobytes())
