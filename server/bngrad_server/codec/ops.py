"""The ops of the protocol: their messages, and what their attributes mean."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from bngrad_kernels.problem import GradGradProblem, Problem
from bngrad_kernels.spec import FieldViolation, InvalidArgumentError, ReserveSpace2Kind, Spec
from bngrad_kernels.validation import (
    batch_norm_training_backprop_spec,
    fused_batch_norm_grad_grad_spec,
    fused_batch_norm_grad_v2_spec,
    fused_batch_norm_grad_v3_spec,
)
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

TRANSPORTS = ("unary", "stream", "shared")
"""How the elements of a request travel: in its message, in chunks of an exchange, or in shared memory."""

_RESERVE_SPACE_2_KINDS = {
    pb.RESERVE_SPACE2_KIND_UNSPECIFIED: ReserveSpace2Kind.VARIANCE,
    pb.RESERVE_SPACE2_KIND_VARIANCE: ReserveSpace2Kind.VARIANCE,
    pb.RESERVE_SPACE2_KIND_INVERSE_STD: ReserveSpace2Kind.INVERSE_STD,
}


@dataclass(frozen=True, slots=True)
class Op:
    """An op: its messages, and the names of their fields.

    Attributes:
        name: The name of its call.
        request_type: The class of its request.
        response_type: The class of its response, whose first fields are the outputs, in the problem's order.
        spec: Validates the headers and attributes of a request.
        attributes: Reads the attributes that a message has.
        large_inputs: The fields of the inputs of the shape of x, in the problem's order.
        small_inputs: The fields of the 1-D inputs, in the problem's order.
        locations: The fields that hold the locations of the outputs of the shape of x.
        optional: The inputs that may be left out.
        ignored: The inputs whose elements are not used.
    """

    name: str
    request_type: type[Message]
    response_type: type[Message]
    spec: Callable[..., Spec]
    attributes: Callable[[Any], dict[str, Any]]
    large_inputs: tuple[str, ...] = Problem.large_inputs
    small_inputs: tuple[str, ...] = Problem.small_inputs
    locations: tuple[str, ...] = ("x_backprop_location",)
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def exchange_number(self) -> int:
        """The field number of its request and its response in the messages of an exchange."""
        parts = pb.ExchangeRequest.DESCRIPTOR.fields
        return next(part.number for part in parts if part.message_type is self.request_type.DESCRIPTOR)


def _attributes(message: Message, *names: str) -> dict[str, Any]:
    """Returns the attributes that a message has; the spec functions know the defaults of the others."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _kind(field: str, value: pb.ReserveSpace2Kind) -> dict[str, ReserveSpace2Kind]:
    kind = _RESERVE_SPACE_2_KINDS.get(value)
    if kind is None:
        description = f"{field} must be a known ReserveSpace2Kind, not {value}"
        raise InvalidArgumentError((FieldViolation(field, description),))
    return {field: kind}


def _tensorflow_attributes(
    message: pb.FusedBatchNormGradV3Request | pb.FusedBatchNormGradV2Request | pb.FusedBatchNormGradGradRequest,
) -> dict[str, Any]:
    attributes = _attributes(message, "epsilon", "data_format", "is_training")
    return {**attributes, **_kind("reserve_space_2_kind", message.reserve_space_2_kind)}


def _onednn_attributes(message: pb.BatchNormTrainingBackpropRequest) -> dict[str, Any]:
    if not message.HasField("epsilon"):
        raise InvalidArgumentError((FieldViolation("epsilon", "epsilon must be given: it has no default"),))
    return {**_attributes(message, "epsilon", "data_format"), **_kind("variance_kind", message.variance_kind)}


OPS = (
    Op(
        "FusedBatchNormGradV3",
        pb.FusedBatchNormGradV3Request,
        pb.FusedBatchNormGradV3Response,
        fused_batch_norm_grad_v3_spec,
        _tensorflow_attributes,
        optional=("reserve_space_3",),
        ignored=("reserve_space_3",),
    ),
    Op(
        "FusedBatchNormGradV2",
        pb.FusedBatchNormGradV2Request,
        pb.FusedBatchNormGradV2Response,
        fused_batch_norm_grad_v2_spec,
        _tensorflow_attributes,
    ),
    Op(
        "BatchNormTrainingBackprop",
        pb.BatchNormTrainingBackpropRequest,
        pb.BatchNormTrainingBackpropResponse,
        batch_norm_training_backprop_spec,
        _onednn_attributes,
        large_inputs=("output_delta", "input_forward"),
        small_inputs=("gamma", "mean", "variance"),
        locations=("input_delta_location",),
        optional=("gamma",),
    ),
    Op(
        "FusedBatchNormGradGrad",
        pb.FusedBatchNormGradGradRequest,
        pb.FusedBatchNormGradGradResponse,
        fused_batch_norm_grad_grad_spec,
        _tensorflow_attributes,
        large_inputs=GradGradProblem.large_inputs,
        small_inputs=GradGradProblem.small_inputs,
        locations=("grad_y_backprop_location", "grad_x_location"),
    ),
)

SERIES = tuple(itertools.product((op.name for op in OPS), TRANSPORTS))
"""The names of op and transport by which answered requests are counted; a request knows the index of its own."""
