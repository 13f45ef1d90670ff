"""Between the protocol's messages and the engine: what each op's request means, and how its response is laid out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError, Message

from bngrad_kernels.ops import (
    batch_norm_training_backprop_spec,
    fused_batch_norm_grad_v2_spec,
    fused_batch_norm_grad_v3_spec,
)
from bngrad_kernels.spec import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FieldViolation,
    InvalidArgumentError,
    ReserveSpace2Kind,
    Spec,
    TensorHeader,
)
from bngrad_protos import wire
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.jobs import KernelKey
from bngrad_server.metrics import TRANSPORTS
from bngrad_server.staging import Sizes

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

_MAX_RANK = 32
"""Far more than any op takes. The size of a shape of thousands of dimensions would take minutes to multiply out."""
_MAX_PRIORITY = 8
_EMPTY = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[0])


@dataclass(frozen=True, slots=True)
class Op:
    """How an op's messages name what all ops share.

    Attributes:
        name: The name of its call.
        request_type: The class of its request.
        response_type: The class of its response.
        spec: Validates the headers and attributes of a request.
        y_backprop: The name of the field that holds y_backprop; alike for the next ones.
        optional: The inputs that may be left out.
        ignored: The inputs whose elements nobody reads.
        attributes: Reads the attributes that a message has.
    """

    name: str
    request_type: type[Message]
    response_type: type[Message]
    spec: Callable[..., Spec]
    attributes: Callable[[Any], dict[str, Any]]
    y_backprop: str = "y_backprop"
    x: str = "x"
    scale: str = "scale"
    reserve_space_1: str = "reserve_space_1"
    reserve_space_2: str = "reserve_space_2"
    x_backprop_location: str = "x_backprop_location"
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


Source: TypeAlias = slice | pb.Location | None
"""Where a tensor's elements are: in the message, in a shared region, or still to come in chunks."""


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A valid request without its elements; one stands for all that differ in their elements alone.

    Attributes:
        op: The name of its op.
        transport: How its elements come, see `bngrad_server.metrics.TRANSPORTS`.
        series: The number of the two, see `bngrad_server.metrics.Metrics.answered`.
        spec: What to compute.
        sizes: What its tensors take.
        tensors_nbytes: The size of y_backprop, x and x_backprop.
        kernel_key: See `bngrad_server.jobs.Job`; alike priority.
        y_backprop: Where its elements are, as for the others.
        scale: None counts as ones.
        x_backprop_location: Where x_backprop is to be put, rather than sent.
        fields: What the op calls y_backprop, x and x_backprop_location.
        chunked: Whether y_backprop and x come, and x_backprop goes, apart from the messages.
        x_comes_first: Whether x has the lower field number.
        response: What comes before x_backprop, scale_backprop, offset_backprop, and after them, in the response.
    """

    op: str
    transport: str
    series: int
    spec: Spec
    sizes: Sizes
    tensors_nbytes: int
    kernel_key: KernelKey
    priority: int
    y_backprop: Source
    x: Source
    scale: slice | None
    reserve_space_1: slice
    reserve_space_2: slice
    x_backprop_location: pb.Location | None
    fields: tuple[str, str, str]
    chunked: bool
    x_comes_first: bool
    response: tuple[bytes, bytes, bytes, bytes]


class Reader:
    """Reads the requests of one op.

    Args:
        op: The op.
        chunked: Whether the elements of y_backprop and x come apart from the message.
    """

    def __init__(self, op: Op, *, chunked: bool) -> None:
        self.op = op
        self.transport = "stream" if chunked else "unary"
        self._chunked = chunked
        self._decoder = wire.Decoder(op.request_type)
        self._validated = functools.lru_cache(maxsize=1024)(self._validate)

    def read(self, data: bytes) -> Request:
        """Validates a message.

        Raises:
            DecodeError: It is no message of the op's.
            InvalidArgumentError: Names every field that does not meet the op's contract.
        """
        try:
            layout = self._decoder.decode(data)
        except DecodeError as error:
            raise DecodeError(f"the request is no {self.op.request_type.DESCRIPTOR.name}: {error}") from error
        return self._validated(layout) if layout.is_small else self._validate(layout)

    def _validate(self, layout: wire.Layout[Any]) -> Request:
        op, tensors = self.op, layout.tensors
        spec = op.spec(**self._headers(tensors), **op.attributes(layout.message))
        name = op.x_backprop_location
        destination = getattr(layout.message, name) if layout.message.HasField(name) else None
        if destination is not None and self._chunked:
            description = f"{name} must not be given where the elements come in chunks"
            raise InvalidArgumentError((FieldViolation(name, description),))
        sources = (self._source(op.y_backprop, tensors), self._source(op.x, tensors))
        is_shared = any(isinstance(place, pb.Location) for place in (*sources, destination))
        transport = "shared" if is_shared else self.transport
        return Request(
            op.name,
            transport,
            OPS.index(op) * len(TRANSPORTS) + TRANSPORTS.index(transport),
            spec,
            Sizes.of(spec),
            3 * spec.tensor_nbytes,
            (spec.dtype, spec.inner == 1, spec.is_training),
            _priority(layout.message),
            y_backprop=sources[0],
            x=sources[1],
            scale=_elements(tensors[op.scale]) if op.scale in tensors else None,
            reserve_space_1=_elements(tensors[op.reserve_space_1]),
            reserve_space_2=_elements(tensors[op.reserve_space_2]),
            x_backprop_location=destination,
            fields=(op.y_backprop, op.x, op.x_backprop_location),
            chunked=self._chunked,
            x_comes_first=_number(op, op.x) < _number(op, op.y_backprop),
            response=_response_pieces(op.response_type, spec, destination, self._chunked),
        )

    def _headers(self, tensors: Mapping[str, wire.TensorSpan]) -> dict[str, TensorHeader]:
        """What is known of the inputs; one that is optional is left out where the message has none."""
        op = self.op
        violations = []
        headers = {}
        for name in (op.y_backprop, op.x, op.scale, op.reserve_space_1, op.reserve_space_2, *op.ignored):
            violation = self._violation(name, tensors)
            if violation is not None:
                violations.append(FieldViolation(name, violation))
            elif name in tensors:
                headers[name] = self._header(name, tensors[name])
        if violations:
            raise InvalidArgumentError(tuple(violations))
        return headers

    def _violation(self, name: str, tensors: Mapping[str, wire.TensorSpan]) -> str | None:
        if name not in tensors:
            return None if name in self.op.optional else f"{name} must be given"
        span = tensors[name]
        if span.header.dtype not in _DTYPES:
            known = ", ".join(map(_data_type_name, _DTYPES))
            return f"{name} must have one of the dtypes {known}, not {_data_type_name(span.header.dtype)}"
        if len(span.header.shape) > _MAX_RANK:
            return f"{name} must have at most {_MAX_RANK} dimensions, not {len(span.header.shape)}"
        is_large = name in (self.op.y_backprop, self.op.x)
        if span.header.HasField("location") and (span.nbytes or self._chunked or not is_large):
            return f"{name} must not have a location" + (" beside data" if span.nbytes else "")
        if self._chunked and is_large and span.nbytes:
            return f"{name} must come in chunks, not with {span.nbytes} bytes of data"
        return None

    def _header(self, name: str, span: wire.TensorSpan) -> TensorHeader:
        dtype, shape, nbytes = _DTYPES[span.header.dtype], tuple(span.header.shape), span.nbytes
        if span.header.HasField("location") or (self._chunked and name in (self.op.y_backprop, self.op.x)):
            nbytes = math.prod(shape) * dtype.itemsize  # of which the message has none
        return TensorHeader(dtype, shape, nbytes)

    def _source(self, name: str, tensors: Mapping[str, wire.TensorSpan]) -> Source:
        span = tensors[name]
        if span.header.HasField("location"):
            return span.header.location
        return None if self._chunked else _elements(span)


def _number(op: Op, field: str) -> int:
    return op.request_type.DESCRIPTOR.fields_by_name[field].number


def _elements(span: wire.TensorSpan) -> slice:
    return slice(span.start, span.start + span.nbytes)


def _response_pieces(
    response_type: type[Message], spec: Spec, destination: pb.Location | None, chunked: bool
) -> tuple[bytes, bytes, bytes, bytes]:
    large = pb.Tensor(dtype=_DATA_TYPES[spec.dtype], shape=spec.shape)
    if destination is not None:
        large.location.CopyFrom(destination)
    small = pb.Tensor(dtype=_DATA_TYPES[spec.stats_dtype], shape=(spec.channels,))
    empty = [wire.tensor_prefix(field.number, _EMPTY, 0) for field in response_type.DESCRIPTOR.fields[3:]]
    return (
        wire.tensor_prefix(1, large, 0 if chunked or destination is not None else spec.tensor_nbytes),
        wire.tensor_prefix(2, small, spec.stats_nbytes),
        wire.tensor_prefix(3, small, spec.stats_nbytes),
        b"".join(empty),
    )


def _data_type_name(data_type: pb.DataType) -> str:
    """The name of a data type, or the number of one that this version does not know."""
    return pb.DataType.Name(data_type) if data_type in pb.DataType.values() else str(data_type)


def _attributes(message: Message, *names: str) -> dict[str, Any]:
    """The attributes that a message has; the op's defaults, which the spec functions know, are left out."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _priority(message: Any) -> int:
    priority: int = message.priority
    if abs(priority) > _MAX_PRIORITY:
        description = f"priority must be from {-_MAX_PRIORITY} to {_MAX_PRIORITY}, not {priority}"
        raise InvalidArgumentError((FieldViolation("priority", description),))
    return priority


def _tensorflow_attributes(
    message: pb.FusedBatchNormGradV3Request | pb.FusedBatchNormGradV2Request,
) -> dict[str, Any]:
    attributes = _attributes(message, "epsilon", "data_format", "is_training")
    kind = _RESERVE_SPACE_2_KINDS.get(message.reserve_space_2_kind)
    if kind is None:
        description = f"reserve_space_2_kind must be a known ReserveSpace2Kind, not {message.reserve_space_2_kind}"
        raise InvalidArgumentError((FieldViolation("reserve_space_2_kind", description),))
    return {**attributes, "reserve_space_2_kind": kind}


def _onednn_attributes(message: pb.BatchNormTrainingBackpropRequest) -> dict[str, Any]:
    if not message.HasField("epsilon"):
        raise InvalidArgumentError((FieldViolation("epsilon", "epsilon must be given: it has no default"),))
    return _attributes(message, "epsilon", "data_format")


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
        y_backprop="output_delta",
        x="input_forward",
        scale="gamma",
        reserve_space_1="mean",
        reserve_space_2="variance",
        x_backprop_location="input_delta_location",
        optional=("gamma",),
    ),
)
