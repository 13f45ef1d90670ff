"""The ops: from arguments to calls that any transport can make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from bngrad._requests import codec
from bngrad._requests.arrays import as_arrays
from bngrad._requests.attributes import onednn_attributes, tensorflow_attributes
from bngrad._requests.request import Call, Op, check_out
from bngrad._results import (
    Array,
    BatchNormTrainingBackprop,
    FusedBatchNormGradGrad,
    FusedBatchNormGradV2,
    FusedBatchNormGradV3,
)
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

_OPTIONAL = ("reserve_space_3", "gamma")

Result = TypeVar("Result")

_V3 = Op(
    "FusedBatchNormGradV3",
    pb.FusedBatchNormGradV3Request,
    pb.FusedBatchNormGradV3Response,
    large=("y_backprop", "x"),
)
_V2 = Op(
    "FusedBatchNormGradV2",
    pb.FusedBatchNormGradV2Request,
    pb.FusedBatchNormGradV2Response,
    large=("y_backprop", "x"),
)
_ONEDNN = Op(
    "BatchNormTrainingBackprop",
    pb.BatchNormTrainingBackpropRequest,
    pb.BatchNormTrainingBackpropResponse,
    large=("input_forward", "output_delta"),
)
_GRAD_GRAD = Op(
    "FusedBatchNormGradGrad",
    pb.FusedBatchNormGradGradRequest,
    pb.FusedBatchNormGradGradResponse,
    large=("grad_x_backprop", "y_backprop", "x"),
)


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
    priority: int = 0,
    out: Any = None,
) -> Call[FusedBatchNormGradV3]:
    """The call of `bngrad.Client.fused_batch_norm_grad_v3`."""
    attributes = tensorflow_attributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
    tensors = _tensors(
        y_backprop=y_backprop,
        x=x,
        scale=scale,
        reserve_space_1=reserve_space_1,
        reserve_space_2=reserve_space_2,
        reserve_space_3=reserve_space_3,
    )
    # The op ignores what reserve_space_3 holds, so its elements stay at home.
    ignored = tensors.pop("reserve_space_3", None)
    header = b"" if ignored is None else codec.header_piece(6, ignored.dtype, ignored.shape)
    return _call(_V3, tensors, attributes, {"out": out}, FusedBatchNormGradV3, header)


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
    priority: int = 0,
    out: Any = None,
) -> Call[FusedBatchNormGradV2]:
    """The call of `bngrad.Client.fused_batch_norm_grad_v2`."""
    attributes = tensorflow_attributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
    tensors = _tensors(
        y_backprop=y_backprop,
        x=x,
        scale=scale,
        reserve_space_1=reserve_space_1,
        reserve_space_2=reserve_space_2,
    )
    return _call(_V2, tensors, attributes, {"out": out}, FusedBatchNormGradV2)


def batch_norm_training_backprop(
    input_forward: Any,
    output_delta: Any,
    mean: Any,
    variance: Any,
    gamma: Any,
    epsilon: float,
    data_format: str,
    priority: int = 0,
    out: Any = None,
) -> Call[BatchNormTrainingBackprop]:
    """The call of `bngrad.Client.batch_norm_training_backprop`."""
    attributes = onednn_attributes(epsilon, data_format, priority)
    tensors = _tensors(
        input_forward=input_forward, output_delta=output_delta, mean=mean, variance=variance, gamma=gamma
    )
    return _call(_ONEDNN, tensors, attributes, {"out": out}, BatchNormTrainingBackprop)


def fused_batch_norm_grad_grad(
    grad_x_backprop: Any,
    grad_scale_backprop: Any,
    grad_offset_backprop: Any,
    y_backprop: Any,
    x: Any,
    scale: Any,
    reserve_space_1: Any,
    reserve_space_2: Any,
    epsilon: float,
    data_format: str,
    is_training: bool,
    reserve_space_2_kind: str,
    priority: int = 0,
    out: Any = None,
) -> Call[FusedBatchNormGradGrad]:
    """The call of `bngrad.Client.fused_batch_norm_grad_grad`."""
    attributes = tensorflow_attributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
    tensors = _tensors(
        grad_x_backprop=grad_x_backprop,
        grad_scale_backprop=grad_scale_backprop,
        grad_offset_backprop=grad_offset_backprop,
        y_backprop=y_backprop,
        x=x,
        scale=scale,
        reserve_space_1=reserve_space_1,
        reserve_space_2=reserve_space_2,
    )
    if out is not None and (not isinstance(out, tuple | list) or len(out) != 2):
        raise TypeError(f"out must be a pair of arrays, not {type(out).__name__}")
    grad_y_backprop, grad_x = out or (None, None)
    outputs = {"out[0]": grad_y_backprop, "out[1]": grad_x}
    return _call(_GRAD_GRAD, tensors, attributes, outputs, FusedBatchNormGradGrad)


def _tensors(**tensors: Any) -> dict[str, Array]:
    """The arrays of the arguments; without those that may be left out, and are."""
    there = {field: value for field, value in tensors.items() if value is not None or field not in _OPTIONAL}
    return codec.straightened(as_arrays(there))


def _call(
    op: Op,
    tensors: dict[str, Array],
    attributes: dict[str, Any],
    outputs: dict[str, Any],
    result: Callable[..., Result],
    headers: bytes = b"",
) -> Call[Result]:
    """Makes a call.

    Args:
        op: Its op.
        tensors: The arrays by their fields.
        attributes: The other fields.
        outputs: Where the caller wants the outputs of the shape of x, by the names of the arguments.
        result: See `Call`.
        headers: Tensors that go without elements.
    """
    large = {field: tensors.pop(field) for field in op.large}
    others = {**large, **tensors}
    for name, out in outputs.items():
        if out is not None:
            check_out(name, out, others)
            others[name] = out
    rest = codec.attributes_piece(op.message, tuple(attributes.items())) + headers
    return Call(op, large, tensors, rest, tuple(outputs.values()), result)
