"""Encodes arrays in request messages, and decodes those of response messages."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError, Message

from bngrad._errors import FieldViolation, InternalError, invalid_argument
from bngrad._results import Device, ServerInfo
from bngrad.typing import Array
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import messages
from bngrad_wire.fields import MAX_NBYTES, Buffer
from bngrad_wire.limits import MAX_RANK

_DTYPES: dict[pb.DataType, np.dtype[Any]] = {
    pb.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    pb.DATA_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}
_COPIED_NBYTES = 16 * 1024
"""To copy elements up to this size costs less than a view of them."""


def to_wire_layout(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the arrays in C order and little-endian, as the protocol has them; copies only those that are not.

    Raises:
        InvalidArgumentError: The protocol does not have the dtype.
        MemoryError: There is no memory for a copy.
    """
    straight = {}
    violations = []
    for field, array in tensors.items():
        dtype = array.dtype
        if dtype in _DATA_TYPES and array.flags.c_contiguous:
            straight[field] = array
        elif (little_endian := dtype.newbyteorder("<") if dtype.kind == "f" else dtype) in _DATA_TYPES:
            straight[field] = _in_c_order(field, array, little_endian)
        else:
            description = f"{field} must have dtype {_expected_dtypes(field)}, not {dtype.name}"
            violations.append(FieldViolation(field, description))
    if violations:
        raise invalid_argument(*violations)
    return straight


def _in_c_order(field: str, array: Array, dtype: np.dtype[Any]) -> Array:
    try:
        return array.astype(dtype, order="C", copy=False)  # ascontiguousarray adds a dimension to a scalar
    except MemoryError as error:  # a view may have far more elements than its memory
        problem = f"must fit into memory in C order, but shape {array.shape} of {dtype.name} has {array.nbytes} bytes"
        raise MemoryError(f"{field} {problem}") from error


def elements_of(array: Array) -> Buffer:
    """Returns the elements of an array in C order as bytes to be sent; a copy of them if they are few."""
    return array.tobytes() if array.nbytes <= _COPIED_NBYTES else view_of(array)


def view_of(array: Array) -> memoryview:
    """Returns the elements of an array in C order as bytes, writeable if the array is."""
    if not array.size:
        return memoryview(b"")
    return np.asarray(array).reshape(-1).view(np.uint8).data  # a subclass such as np.matrix cannot have one dimension


def tensor_pieces(number: int, array: Array) -> tuple[Buffer, Buffer]:
    """Returns the pieces of a tensor field with its elements."""
    return header_piece(number, array.dtype, array.shape, array.nbytes), elements_of(array)


@functools.lru_cache(maxsize=1024)
def header_piece(number: int, dtype: np.dtype[Any], shape: tuple[int, ...], nbytes: int = 0) -> bytes:
    """Returns a tensor field without elements, or up to its elements of this size."""
    return messages.tensor_prefix(number, pb.Tensor(dtype=_DATA_TYPES[dtype], shape=shape), nbytes)


@functools.lru_cache(maxsize=1024)
def located_piece(number: int, dtype: np.dtype[Any], shape: tuple[int, ...], key: bytes, offset: int) -> bytes:
    """Returns a tensor field whose elements are in a region of shared memory."""
    location = pb.Location(region_key=key, offset=offset)
    return messages.tensor_prefix(number, pb.Tensor(dtype=_DATA_TYPES[dtype], shape=shape, location=location), 0)


def ticket_piece(
    number: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    ticket: bytes,
    place: tuple[bytes, int] | None = None,
) -> bytes:
    """Returns a tensor field whose elements were sent ahead, or copied from a place in shared memory."""
    header = pb.Tensor(dtype=_DATA_TYPES[dtype], shape=shape, ticket=ticket, location=_location(place))
    return messages.tensor_prefix(number, header, 0)


def ahead_message(tensor: Array | None, place: tuple[bytes, int] | None, forget: Sequence[bytes]) -> bytes:
    """Returns the message that sends a tensor ahead, and forgets others; it follows in chunks, or has a place."""
    header = None
    if tensor is not None:
        header = pb.Tensor(dtype=_DATA_TYPES[tensor.dtype], shape=tensor.shape, location=_location(place))
    return pb.SendAheadRequest(tensor=header, forget=forget).SerializeToString()


def _location(place: tuple[bytes, int] | None) -> pb.Location | None:
    return None if place is None else pb.Location(region_key=place[0], offset=place[1])


def read_ticket(response: bytes) -> bytes:
    """Returns the ticket of a tensor that was sent ahead.

    Raises:
        InternalError: The response is malformed.
    """
    try:
        return pb.SendAheadResponse.FromString(response).ticket
    except DecodeError as error:
        raise InternalError(f"the server's answer is no SendAheadResponse: {error}") from error


@functools.lru_cache(maxsize=1024)
def location_piece(number: int, key: bytes, offset: int) -> bytes:
    """Returns a field with the location of an output."""
    location = pb.Location(region_key=key, offset=offset).SerializeToString()
    return messages.field_prefix(number, len(location)) + location


@functools.lru_cache(maxsize=1024)
def attributes_piece(message_type: Callable[..., Message], attributes: tuple[tuple[str, Any], ...]) -> bytes:
    """Returns the fields that are not tensors."""
    return message_type(**dict(attributes)).SerializeToString()


class ResponseReader:
    """Reads the responses of an op."""

    def __init__(self, message_type: type[Message], large: int) -> None:
        """Reads none yet; ``large`` is how many of the first tensors have the shape of x."""
        self._name = message_type.DESCRIPTOR.name
        self._fields = [field.name for field in message_type.DESCRIPTOR.fields]
        self._large = large
        # By whether the elements of the large tensors come apart from the message.
        self._decoders = {
            apart: messages.Decoder(message_type, functools.partial(self._check, apart)) for apart in (False, True)
        }

    def read(self, data: bytes, large: Sequence[Array | None], *, apart: bool) -> dict[str, Array]:
        """Returns the tensors of a response by the names of its fields.

        Args:
            data: The message.
            large: Where to put the elements of the large tensors; a new array for None.
            apart: Whether these came apart from the message, and are in place already.

        Raises:
            InternalError: The response is malformed.
        """
        try:
            tensors = self._decoders[apart].decode(data)
        except DecodeError as error:
            raise InternalError(f"the server's answer is no {self._name}: {error}") from error
        arrays = {}
        for (field, dtype, shape, start), out in zip_longest(tensors, large):
            if out is not None and (out.dtype != dtype or out.shape != shape):
                has, expected = f"shape {shape} of {dtype.name}", f"{out.shape} of {out.dtype.name}"
                raise InternalError(f"the server's {field} has {has}, not {expected}")
            if apart and out is not None:
                arrays[field] = out
                continue
            view: Array = np.ndarray(shape, dtype, data, start)
            if out is None:
                arrays[field] = view.copy()
            else:
                np.copyto(out, view)
                arrays[field] = out
        return arrays

    def _check(
        self, apart: bool, layout: messages.Layout[Any]
    ) -> list[tuple[str, np.dtype[Any], tuple[int, ...], int]]:
        """Returns name, dtype, shape and the start of the elements of each tensor."""
        if missing := [field for field in self._fields if field not in layout.tensors]:
            raise InternalError(f"the server's answer has no {', '.join(missing)}")
        checked = []
        for i, field in enumerate(self._fields):
            span = layout.tensors[field]
            dtype, shape = _DTYPES.get(span.header.dtype), tuple(span.header.shape)
            if dtype is None:
                has = f"the dtype {span.header.dtype}, which this client does not know"
                raise InternalError(f"the server's {field} has {has}")
            if len(shape) > MAX_RANK:
                raise InternalError(f"the server's {field} has {len(shape)} dimensions, more than {MAX_RANK}")
            expected = 0 if apart and i < self._large else math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or span.nbytes != expected:
                raise InternalError(f"the server's {field} has {span.nbytes} bytes for shape {shape} of {dtype.name}")
            checked.append((field, dtype, shape, span.start))
        return checked


def read_server_info(data: bytes) -> tuple[ServerInfo, pb.Endpoints]:
    """Decodes a server's description of itself, and its endpoints beside grpcio's.

    Raises:
        InternalError: The response is malformed.
    """
    try:
        if len(data) > MAX_NBYTES:
            raise DecodeError(f"it has {len(data)} bytes, more than {MAX_NBYTES}")
        message = pb.ServerInfoResponse.FromString(data)
    except DecodeError as error:
        raise InternalError(f"the server's answer is no ServerInfoResponse: {error}") from error
    info = ServerInfo(
        version=message.version,
        devices=tuple(
            Device(device.name, device.description, _state(device.state), device.restarts, device.memory_bytes)
            for device in message.devices
        ),
        ops=tuple(message.ops),
        max_message_bytes=message.limits.max_message_bytes,
        arena_bytes=message.limits.arena_bytes,
        requests=message.requests,
        unread_connections=message.unread_connections,
        batch_sizes=tuple(message.batch_sizes),
        stream_port=message.endpoints.stream_port,
        stream_host=message.endpoints.stream_host,
        local_directory=message.endpoints.local_directory,
        device_remark=message.device_remark,
        compiling=tuple(message.compiling),
    )
    return info, message.endpoints


def _expected_dtypes(field: str) -> str:
    if field in ("y_backprop", "x", "grad_x_backprop", "input_forward", "output_delta"):
        return "float16, bfloat16 or float32"
    if field in ("mean", "variance", "gamma"):
        return "float32, or bfloat16 beside a bfloat16 input_forward"
    return "float32"


def _state(state: pb.WorkerState) -> str:
    name = pb.WorkerState.Name(state) if state in pb.WorkerState.values() else "WORKER_STATE_UNSPECIFIED"
    return name.removeprefix("WORKER_STATE_").lower()
