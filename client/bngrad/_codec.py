"""Arrays into request messages and out of response messages; nothing else in the client touches protobuf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError, Message

from bngrad._errors import FieldViolation, InternalError, invalid_argument
from bngrad._results import Array, Device, ServerInfo
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

_DTYPES: dict[pb.DataType, np.dtype[Any]] = {
    pb.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    pb.DATA_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}

_MAX_TENSOR_BYTES = 2**31 - 1 - 4096
"""What protobuf can hold in one message, less 4096 bytes for all that is no element of a tensor."""

AnyMessage = TypeVar("AnyMessage", bound=Message)


def encode(
    message_type: type[Message],
    tensors: Mapping[str, Array],
    attributes: Mapping[str, Any],
    *,
    headers: Mapping[str, Array] = MappingProxyType({}),
) -> bytes:
    """A request.

    Args:
        message_type: The request's type.
        tensors: The fields that are sent whole, in any memory layout and byte order.
        attributes: The fields that are no tensors.
        headers: The tensors of which only dtype and shape are sent.

    Raises:
        InvalidArgumentError: The protocol cannot express a dtype, or the tensors are too large for one message.
    """
    violations = [
        FieldViolation(field, f"{field} must have dtype {_expected_dtypes(field)}, not {array.dtype.name}")
        for field, array in {**tensors, **headers}.items()
        if _little_endian(array.dtype) not in _DATA_TYPES
    ]
    if violations:
        raise invalid_argument(*violations)
    nbytes = sum(array.nbytes for array in tensors.values())
    if nbytes > _MAX_TENSOR_BYTES:
        largest = max(tensors, key=lambda field: tensors[field].nbytes)
        description = f"{', '.join(tensors)} must have at most {_MAX_TENSOR_BYTES} bytes together, not {nbytes}"
        raise invalid_argument(FieldViolation(largest, description))
    message = message_type(
        **attributes,
        **{field: _header(array) for field, array in headers.items()},
        **{field: _tensor(array) for field, array in tensors.items()},
    )
    return message.SerializeToString()


def decode_tensors(message_type: type[Message], data: bytes) -> dict[str, Array]:
    """The tensors of an answer by the names of its fields: new arrays that own their memory.

    Raises:
        InternalError: The answer is malformed.
    """
    message = _parse(message_type, data)
    return {field.name: _array(field.name, getattr(message, field.name)) for field in message_type.DESCRIPTOR.fields}


def encode_server_info_request() -> bytes:
    """The request for `decode_server_info`'s answer."""
    return pb.ServerInfoRequest().SerializeToString()


def decode_server_info(data: bytes) -> ServerInfo:
    """What a server says of itself.

    Raises:
        InternalError: The answer is malformed.
    """
    message = _parse(pb.ServerInfoResponse, data)
    return ServerInfo(
        version=message.version,
        devices=tuple(
            Device(device.name, device.description, _state(device.state), device.restarts) for device in message.devices
        ),
        ops=tuple(message.ops),
        max_message_bytes=message.limits.max_message_bytes,
        arena_bytes=message.limits.arena_bytes,
    )


def _expected_dtypes(field: str) -> str:
    if field in ("y_backprop", "x", "input_forward", "output_delta"):
        return "float16, bfloat16 or float32"
    if field in ("mean", "variance", "gamma"):
        return "float32, or bfloat16 beside a bfloat16 input_forward"
    return "float32"


def _header(array: Array) -> pb.Tensor:
    return pb.Tensor(dtype=_DATA_TYPES[_little_endian(array.dtype)], shape=array.shape)


def _tensor(array: Array) -> pb.Tensor:
    # tobytes() straightens the memory layout; the byte order only changes on a copy, and only if it has to.
    data = array.astype(_little_endian(array.dtype), copy=False).tobytes()
    return pb.Tensor(dtype=_DATA_TYPES[_little_endian(array.dtype)], shape=array.shape, data=data)


def _little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _parse(message_type: type[AnyMessage], data: bytes) -> AnyMessage:
    message = message_type()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InternalError(f"the server's answer is no {message_type.DESCRIPTOR.name}: {error}") from error
    return message


def _array(field: str, tensor: pb.Tensor) -> Array:
    dtype, shape = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is None:
        raise InternalError(f"the server's {field} has the dtype {tensor.dtype}, which this client does not know")
    if min(shape, default=0) < 0 or len(tensor.data) != math.prod(shape) * dtype.itemsize:
        description = f"the server's {field} has {len(tensor.data)} bytes for shape {shape} of {dtype.name}"
        raise InternalError(description)
    return np.frombuffer(tensor.data, dtype).reshape(shape).copy()


def _state(state: pb.WorkerState) -> str:
    name = pb.WorkerState.Name(state) if state in pb.WorkerState.values() else "WORKER_STATE_UNSPECIFIED"
    return name.removeprefix("WORKER_STATE_").lower()
