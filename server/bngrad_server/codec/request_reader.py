"""Reads and validates the messages of requests, and lays out their responses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from bngrad_kernels.problem import problem_type
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, FieldViolation, InvalidArgumentError, Spec, TensorHeader
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import SERIES, Op
from bngrad_server.codec.request import InvalidRequestError, Request, Source
from bngrad_server.memory.layout import Sizes
from bngrad_wire import messages
from bngrad_wire.fields import Buffer
from bngrad_wire.limits import MAX_PRIORITY, MAX_RANK

_DTYPES: dict[pb.DataType, np.dtype[Any]] = {
    pb.DATA_TYPE_FLOAT16: FLOAT16,
    pb.DATA_TYPE_BFLOAT16: BFLOAT16,
    pb.DATA_TYPE_FLOAT32: FLOAT32,
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}

_EMPTY = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=[0])

_PREFIXES_NBYTES = 64
"""More than the prefixes of the messages of a response take, and those of its chunks."""


def ahead_header(tensor: pb.Tensor) -> TensorHeader:
    """Reads the header of a tensor that is sent ahead.

    Raises:
        InvalidArgumentError: It is no tensor that the requests of any op may have.
    """
    shape, dtype = tuple(tensor.shape), _DTYPES.get(tensor.dtype)
    problem = ""
    if dtype is None:
        known = ", ".join(map(_data_type_name, _DTYPES))
        problem = f"must have one of the dtypes {known}, not {_data_type_name(tensor.dtype)}"
    elif not 2 <= len(shape) <= MAX_RANK:
        problem = f"must have 2 to {MAX_RANK} dimensions, not {len(shape)}"
    elif min(shape) < 1:
        problem = f"must have at least one element, not shape {shape}"
    elif tensor.data or tensor.HasField("ticket"):
        problem = "must have neither data nor a ticket: its elements come in chunks, or lie at its location"
    if dtype is None or problem:
        raise InvalidArgumentError((FieldViolation("tensor", f"tensor {problem}"),))
    return TensorHeader(dtype, shape, math.prod(shape) * dtype.itemsize)


class RequestReader:
    """Reads the requests of one op.

    Args:
        op: The op.
        chunked: Whether the elements of the inputs of the shape of x come in chunks, apart from the message.
    """

    def __init__(self, op: Op, *, chunked: bool) -> None:
        self.op = op
        self.transport = "stream" if chunked else "unary"
        self._chunked = chunked
        self._decoder = messages.Decoder(op.request_type, self._validate)
        fields = op.request_type.DESCRIPTOR.fields_by_name
        numbers = [fields[name].number for name in op.large_inputs]
        self._chunk_order = tuple(sorted(range(len(numbers)), key=numbers.__getitem__))

    def read(self, data: Buffer) -> Request:
        """Decodes and validates a message.

        Raises:
            DecodeError: The message is malformed, or exceeds the bounds of `bngrad_wire.fields`.
            InvalidRequestError: The request is invalid; names every field that is wrong.
        """
        try:
            return self._decoder.decode(data)
        except DecodeError as error:
            raise self._decode_error(error) from error

    def check_beginning(self, beginning: Buffer, nbytes: int) -> None:
        """Checks the first bytes of a message of ``nbytes``.

        Raises:
            DecodeError: Whatever follows, `read` would refuse the message.
        """
        try:
            self._decoder.check_beginning(beginning, nbytes)
        except DecodeError as error:
            raise self._decode_error(error) from error

    def known(self, data: Buffer) -> Request | None:
        """Returns the request of a message that is laid out like an earlier one; None for any other."""
        return self._decoder.known(data)

    def transport_of(self, data: Buffer) -> str:
        """Returns the transport of a request that could not be read, as far as it is known."""
        request = self._decoder.known(data)
        return self.transport if request is None else request.transport

    def _decode_error(self, error: DecodeError) -> DecodeError:
        return DecodeError(f"the request is no {self.op.request_type.DESCRIPTOR.name}: {error}")

    def _validate(self, layout: messages.Layout[Any]) -> Request:
        spans, has = layout.tensors.values(), layout.message.HasField
        is_shared = any(span.header.HasField("location") for span in spans) or any(map(has, self.op.locations))
        transport = "shared" if is_shared else self.transport
        try:
            return self._request(layout, transport)
        except InvalidArgumentError as error:
            raise InvalidRequestError(error.violations, transport) from error

    def _request(self, layout: messages.Layout[Any], transport: str) -> Request:
        op, tensors = self.op, layout.tensors
        spec = op.spec(**self._headers(tensors), **op.attributes(layout.message))
        locations = tuple(self._location(name, layout.message) for name in op.locations)
        large_inputs = tuple(self._source(tensors[name]) for name in op.large_inputs)
        sizes = Sizes.of(spec)
        tensors_nbytes = (len(op.large_inputs) + len(locations)) * sizes.tensor
        ahead_nbytes = sum(isinstance(source, bytes) for source in large_inputs) * sizes.tensor
        response = _response_pieces(op, spec, locations, self._chunked)
        prefixes_nbytes = _PREFIXES_NBYTES + sum(map(len, response))
        return Request(
            op,
            transport,
            SERIES.index((op.name, transport)),
            spec,
            sizes,
            (spec.dtype, spec.inner == 1, spec.is_training, spec.order),
            _priority(layout.message),
            large_inputs=large_inputs,
            tickets=tuple(_ticket(tensors[name].header) for name in op.large_inputs),
            small_inputs=tuple(_elements(tensors[name]) if name in tensors else None for name in op.small_inputs),
            locations=locations,
            chunked=self._chunked,
            chunk_order=self._chunk_order,
            response=response,
            tensor_count=len(op.large_inputs) + len(locations),
            tensors_nbytes=tensors_nbytes,
            new_nbytes=tensors_nbytes - ahead_nbytes,
            response_nbytes=locations.count(None) * sizes.tensor + sizes.all_stats + prefixes_nbytes,
        )

    def _headers(self, tensors: Mapping[str, messages.TensorSpan]) -> dict[str, TensorHeader]:
        """Returns the headers of the inputs that the message has."""
        op = self.op
        violations = []
        headers = {}
        for name in (*op.large_inputs, *op.small_inputs, *op.ignored):
            violation = self._violation(name, tensors)
            if violation is not None:
                violations.append(FieldViolation(name, violation))
            elif name in tensors:
                headers[name] = self._header(name, tensors[name])
        if violations:
            raise InvalidArgumentError(tuple(violations))
        return headers

    def _violation(self, name: str, tensors: Mapping[str, messages.TensorSpan]) -> str | None:
        if name not in tensors:
            return None if name in self.op.optional else f"{name} must be given"
        span = tensors[name]
        if span.header.dtype not in _DTYPES:
            known = ", ".join(map(_data_type_name, _DTYPES))
            return f"{name} must have one of the dtypes {known}, not {_data_type_name(span.header.dtype)}"
        if len(span.header.shape) > MAX_RANK:
            return f"{name} must have at most {MAX_RANK} dimensions, not {len(span.header.shape)}"
        return self._source_violation(name, span)

    def _source_violation(self, name: str, span: messages.TensorSpan) -> str | None:
        is_large = name in self.op.large_inputs
        for field, is_allowed in (("location", is_large and not self._chunked), ("ticket", is_large)):
            if span.header.HasField(field) and (span.nbytes or not is_allowed):
                return f"{name} must not have a {field}" + (" beside data" if span.nbytes else "")
        if self._chunked and is_large and span.nbytes:
            return f"{name} must come in chunks, not with {span.nbytes} bytes of data"
        return None

    def _header(self, name: str, span: messages.TensorSpan) -> TensorHeader:
        dtype, shape, nbytes = _DTYPES[span.header.dtype], tuple(span.header.shape), span.nbytes
        is_elsewhere = span.header.HasField("location") or span.header.HasField("ticket")
        if is_elsewhere or (self._chunked and name in self.op.large_inputs):
            nbytes = math.prod(shape) * dtype.itemsize  # the message has none of them
        return TensorHeader(dtype, shape, nbytes)

    def _source(self, span: messages.TensorSpan) -> Source:
        if span.header.HasField("location"):
            return span.header.location
        if span.header.HasField("ticket"):
            return span.header.ticket
        return None if self._chunked else _elements(span)

    def _location(self, name: str, message: Any) -> pb.Location | None:
        if not message.HasField(name):
            return None
        if self._chunked:
            description = f"{name} must not be given where the elements come in chunks"
            raise InvalidArgumentError((FieldViolation(name, description),))
        location: pb.Location = getattr(message, name)
        return location


def _ticket(header: pb.Tensor) -> bytes:
    return header.ticket if header.HasField("location") else b""


def _elements(span: messages.TensorSpan) -> slice:
    return slice(span.start, span.start + span.nbytes)


def _response_pieces(op: Op, spec: Spec, locations: tuple[pb.Location | None, ...], chunked: bool) -> tuple[bytes, ...]:
    pieces = []
    for number, location in enumerate(locations, 1):
        large = pb.Tensor(dtype=_DATA_TYPES[spec.dtype], shape=spec.shape, location=location)
        nbytes = 0 if chunked or location is not None else spec.tensor_nbytes
        pieces.append(messages.tensor_prefix(number, large, nbytes))
    small = pb.Tensor(dtype=_DATA_TYPES[spec.stats_dtype], shape=(spec.channels,))
    outputs = len(locations) + len(problem_type(spec).small_outputs)
    for number in range(len(locations) + 1, outputs + 1):
        pieces.append(messages.tensor_prefix(number, small, spec.stats_nbytes))
    empty = [messages.tensor_prefix(field.number, _EMPTY, 0) for field in op.response_type.DESCRIPTOR.fields[outputs:]]
    return (*pieces, b"".join(empty))


def _data_type_name(data_type: pb.DataType) -> str:
    """Returns the name of a data type, or its number if this version does not know it."""
    return pb.DataType.Name(data_type) if data_type in pb.DataType.values() else str(data_type)


def _priority(message: Any) -> int:
    priority: int = message.priority
    if abs(priority) > MAX_PRIORITY:
        description = f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {priority}"
        raise InvalidArgumentError((FieldViolation("priority", description),))
    return priority
