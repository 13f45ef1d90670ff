"""A call of an op without its transport: its request as messages, and its answer as a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import Message

from bngrad._errors import FieldViolation, invalid_argument
from bngrad._requests import codec
from bngrad._results import Array
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.limits import MAX_PROTOBUF_NBYTES
from bngrad_wire.messages import Buffer

SERVICE = pb.DESCRIPTOR.services_by_name["BatchNormGradService"].full_name
SERVER_INFO_METHOD = f"/{SERVICE}/ServerInfo"
EXCHANGE_METHOD = f"/{SERVICE}/Exchange"

Result = TypeVar("Result")


class Op:
    """How an op's messages look.

    Attributes:
        method: The path of the gRPC method.
        message: Makes its request's message.
        large: The fields of the tensors of more dimensions than one, in the order of their numbers.
        number: The number of its request and its response in an exchange.
        fields: The numbers of the request's fields.
        location_numbers: The numbers of the fields that say where the outputs go that have more dimensions than one;
            they are the first of the response, in this order.
        responses: Reads its response.
    """

    def __init__(
        self, name: str, request_type: type[Message], response_type: type[Message], *, large: tuple[str, ...]
    ) -> None:
        self.method = f"/{SERVICE}/{name}"
        self.message: Callable[..., Message] = request_type
        self.large = large
        parts = pb.ExchangeRequest.DESCRIPTOR.fields
        self.number = next(part.number for part in parts if part.message_type is request_type.DESCRIPTOR)
        self.fields = {field.name: field.number for field in request_type.DESCRIPTOR.fields}
        self.location_numbers = [number for field, number in self.fields.items() if field.endswith("_location")]
        self.responses = codec.ResponseReader(response_type, len(self.location_numbers))


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """A call that any transport can make.

    Attributes:
        op: How its messages look.
        large: The tensors of more dimensions than one, by the names of their fields, in the fields' order.
        small: The other tensors, alike.
        rest: The fields that are no tensors, and the tensors that go without elements.
        out: Where the caller wants each output of the shape of x; None where it does not care.
        result: Makes the result from the response's tensors.
    """

    op: Op
    large: dict[str, Array]
    small: dict[str, Array]
    rest: bytes
    out: tuple[Array | None, ...]
    result: Callable[..., Result]

    @property
    def arrays(self) -> list[Array]:
        """The large tensors, and where outputs go if the caller said so."""
        return [*self.large.values(), *(out for out in self.out if out is not None)]

    @property
    def nbytes(self) -> int:
        """The size of each large tensor."""
        return next(iter(self.large.values())).nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the large tensors, and of the outputs of their shape."""
        return next(iter(self.large.values())).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the large tensors, and of the first outputs."""
        return next(iter(self.large.values())).shape

    def small_pieces(self) -> list[Buffer]:
        """All of the request but the large tensors."""
        pieces: list[Buffer] = []
        for field, array in self.small.items():
            pieces += codec.tensor_pieces(self.op.fields[field], array)
        pieces.append(self.rest)
        return pieces

    def pieces(self) -> list[Buffer]:
        """The whole request as one message.

        Raises:
            InvalidArgumentError: The tensors are too large for a message.
        """
        pieces = self.small_pieces()
        for field, array in self.large.items():
            pieces += codec.tensor_pieces(self.op.fields[field], array)
        nbytes = sum(map(len, pieces))
        if nbytes > MAX_PROTOBUF_NBYTES:
            field = next(iter(self.large))
            description = f"the request must have at most {MAX_PROTOBUF_NBYTES} bytes as one message, not {nbytes}"
            raise invalid_argument(FieldViolation(field, description))
        return pieces

    def header_pieces(self) -> list[Buffer]:
        """The request of an exchange, whose large tensors follow in chunks."""
        headers = [
            codec.header_piece(self.op.fields[field], array.dtype, array.shape) for field, array in self.large.items()
        ]
        return [*headers, *self.small_pieces()]

    @property
    def request(self) -> bytes:
        """The whole request as one message, in one piece."""
        return b"".join(self.pieces())

    def read(self, response: bytes, outputs: Sequence[Array | None] = (), *, apart: bool = False) -> Result:
        """The result.

        Args:
            response: The message that came back.
            outputs: Where to put each output of the shape of x; a new array where None, or where there are none.
            apart: Whether these came apart from the message, and are there already.

        Raises:
            InternalError: The response is malformed.
        """
        return self.result(**self.op.responses.read(response, outputs, apart=apart))


def check_out(name: str, out: Any, others: Mapping[str, Array]) -> None:
    """Refuses an array that an output of the shape of x cannot be put into.

    Args:
        name: What the caller knows the argument as.
        out: The argument.
        others: The arrays that it must not overlap; the first of them is like it.

    Raises:
        TypeError: It is no NumPy array.
        InvalidArgumentError: It is of another kind, read-only, or overlaps another one.
    """
    if not isinstance(out, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(out).__name__}")
    like = next(iter(others.values()))
    problem = ""
    if (out.dtype, out.shape) != (like.dtype, like.shape):
        problem = f"must have shape {like.shape} of {like.dtype}, not {out.shape} of {out.dtype}"
    elif not out.flags.writeable:
        problem = "must be writeable"
    elif overlapped := [field for field, array in others.items() if np.may_share_memory(out, array)]:
        problem = f"must not overlap {overlapped[0]}"
    if problem:
        raise invalid_argument(FieldViolation(name, f"{name} {problem}"))
