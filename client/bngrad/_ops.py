"""The calls of the service without their transport: arguments to messages, messages to results."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import Message

from bngrad import _codec
from bngrad._arrays import as_arrays
from bngrad._errors import FieldViolation, invalid_argument
from bngrad._results import Array, BatchNormTrainingBackprop, FusedBatchNormGradV2, FusedBatchNormGradV3
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.wire import Buffer

SERVICE = pb.DESCRIPTOR.services_by_name["BatchNormGradService"].full_name
SERVER_INFO_METHOD = f"/{SERVICE}/ServerInfo"
EXCHANGE_METHOD = f"/{SERVICE}/Exchange"

MAX_MESSAGE_NBYTES = 2**31 - 1
"""What protobuf can hold in one message."""

MAX_PRIORITY = 8

_RESERVE_SPACE_2_KINDS: Mapping[str, pb.ReserveSpace2Kind] = {
    "variance": pb.RESERVE_SPACE2_KIND_VARIANCE,
    "inverse_std": pb.RESERVE_SPACE2_KIND_INVERSE_STD,
}

_OPTIONAL = ("reserve_space_3", "gamma")

Result = TypeVar("Result")


class Op:
    """How an op's messages look.

    Attributes:
        method: The path of the gRPC method.
        message: Makes its request's message.
        number: The number of its request and its response in an exchange.
        fields: The numbers of the request's fields.
        location_number: The number of the field that says where the first output goes.
        responses: Reads its response.
    """

    def __init__(
        self, name: str, request_type: type[Message], response_type: type[Message], exchange_field: str
    ) -> None:
        self.method = f"/{SERVICE}/{name}"
        self.message: Callable[..., Message] = request_type
        self.number = pb.ExchangeRequest.DESCRIPTOR.fields_by_name[exchange_field].number
        self.fields = {field.name: field.number for field in request_type.DESCRIPTOR.fields}
        self.location_number = next(n for name, n in self.fields.items() if name.endswith("_location"))
        self.responses = _codec.ResponseReader(response_type)


_V3 = Op(
    "FusedBatchNormGradV3",
    pb.FusedBatchNormGradV3Request,
    pb.FusedBatchNormGradV3Response,
    "fused_batch_norm_grad_v3",
)
_V2 = Op(
    "FusedBatchNormGradV2",
    pb.FusedBatchNormGradV2Request,
    pb.FusedBatchNormGradV2Response,
    "fused_batch_norm_grad_v2",
)
_ONEDNN = Op(
    "BatchNormTrainingBackprop",
    pb.BatchNormTrainingBackpropRequest,
    pb.BatchNormTrainingBackpropResponse,
    "batch_norm_training_backprop",
)


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """A call that any transport can make.

    Attributes:
        op: How its messages look.
        large: The two tensors of more dimensions than one, by the names of their fields, in the fields' order.
        small: The other tensors, alike.
        rest: The fields that are no tensors, and the tensors that go without elements.
        out: Where the caller wants the gradient of x.
        result: Makes the result from the response's tensors.
    """

    op: Op
    large: dict[str, Array]
    small: dict[str, Array]
    rest: bytes
    out: Array | None
    result: Callable[..., Result]

    @property
    def arrays(self) -> list[Array]:
        """The large tensors, and where the gradient of x goes if the caller said so."""
        return [*self.large.values(), *(() if self.out is None else (self.out,))]

    @property
    def nbytes(self) -> int:
        """The size of each large tensor."""
        return next(iter(self.large.values())).nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the large tensors, and of the gradient of x."""
        return next(iter(self.large.values())).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the large tensors, and of the gradient of x."""
        return next(iter(self.large.values())).shape

    def small_pieces(self) -> list[Buffer]:
        """All of the request but the large tensors."""
        pieces: list[Buffer] = []
        for field, array in self.small.items():
            pieces += _codec.tensor_pieces(self.op.fields[field], array)
        pieces.append(self.rest)
        return pieces

    def pieces(self) -> list[Buffer]:
        """The whole request as one message.

        Raises:
            InvalidArgumentError: The tensors are too large for a message.
        """
        pieces = self.small_pieces()
        for field, array in self.large.items():
            pieces += _codec.tensor_pieces(self.op.fields[field], array)
        nbytes = sum(map(len, pieces))
        if nbytes > MAX_MESSAGE_NBYTES:
            field = next(iter(self.large))
            description = f"the request must have at most {MAX_MESSAGE_NBYTES} bytes as one message, not {nbytes}"
            raise invalid_argument(FieldViolation(field, description))
        return pieces

    def header_pieces(self) -> list[Buffer]:
        """The request of an exchange, whose large tensors follow in chunks."""
        headers = [
            _codec.header_piece(self.op.fields[field], array.dtype, array.shape) for field, array in self.large.items()
        ]
        return [*headers, *self.small_pieces()]

    @property
    def request(self) -> bytes:
        """The whole request as one message, in one piece."""
        return b"".join(self.pieces())

    def read(self, response: bytes, x_backprop: Array | None = None, *, apart: bool = False) -> Result:
        """The result.

        Args:
            response: The message that came back.
            x_backprop: Where to put the gradient of x, which the op may call otherwise; a new array where None.
            apart: Whether it came apart from the message, and is there already.

        Raises:
            InternalError: The response is malformed.
        """
        return self.result(**self.op.responses.read(response, x_backprop, apart=apart))


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
    attributes = _tensorflow_attributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
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
    header = b"" if ignored is None else _codec.header_piece(6, ignored.dtype, ignored.shape)
    return _call(_V3, tensors, attributes, out, FusedBatchNormGradV3, header)


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
    attributes = _tensorflow_attributes(epsilon, data_format, is_training, reserve_space_2_kind, priority)
    tensors = _tensors(
        y_backprop=y_backprop,
        x=x,
        scale=scale,
        reserve_space_1=reserve_space_1,
        reserve_space_2=reserve_space_2,
    )
    return _call(_V2, tensors, attributes, out, FusedBatchNormGradV2)


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
    attributes = {"epsilon": _epsilon(epsilon), "data_format": _data_format(data_format), **_priority(priority)}
    tensors = _tensors(
        input_forward=input_forward, output_delta=output_delta, mean=mean, variance=variance, gamma=gamma
    )
    return _call(_ONEDNN, tensors, attributes, out, BatchNormTrainingBackprop)


def _tensors(**tensors: Any) -> dict[str, Array]:
    """The arrays of the arguments; without those that may be left out, and are."""
    there = {field: value for field, value in tensors.items() if value is not None or field not in _OPTIONAL}
    return _codec.straightened(as_arrays(there))


def _call(
    op: Op,
    tensors: dict[str, Array],
    attributes: dict[str, Any],
    out: Any,
    result: Callable[..., Result],
    headers: bytes = b"",
) -> Call[Result]:
    names = list(tensors)
    large = {field: tensors.pop(field) for field in names[:2]}
    if out is not None:
        _check_out(out, large)
    rest = _codec.attributes_piece(op.message, tuple(attributes.items())) + headers
    return Call(op, large, tensors, rest, out, result)


def _check_out(out: Any, large: Mapping[str, Array]) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(out).__name__}")
    like = next(iter(large.values()))
    problem = ""
    if (out.dtype, out.shape) != (like.dtype, like.shape):
        problem = f"must have shape {like.shape} of {like.dtype.name}, not {out.shape} of {out.dtype.name}"
    elif not out.flags.writeable:
        problem = "must be writeable"
    elif overlapped := [field for field, array in large.items() if np.may_share_memory(out, array)]:
        problem = f"must not overlap {overlapped[0]}"
    if problem:
        raise invalid_argument(FieldViolation("out", f"out {problem}"))


def _tensorflow_attributes(
    epsilon: float, data_format: str, is_training: bool, reserve_space_2_kind: str, priority: int
) -> dict[str, Any]:
    if not isinstance(is_training, bool | np.bool_):
        raise TypeError(f"is_training must be a bool, not {is_training!r}")
    return {
        "epsilon": _epsilon(epsilon),
        "data_format": _data_format(data_format),
        "is_training": bool(is_training),
        "reserve_space_2_kind": _reserve_space_2_kind(reserve_space_2_kind),
        **_priority(priority),
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


def _priority(priority: int) -> dict[str, int]:
    """The attribute, which is sent only where it says something."""
    if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
        raise TypeError(f"priority must be an int, not {priority!r}")
    if abs(priority) > MAX_PRIORITY:
        description = f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {priority}"
        raise invalid_argument(FieldViolation("priority", description))
    return {"priority": int(priority)} if priority else {}
