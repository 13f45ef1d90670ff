"""Requests that are ready to be sent by any transport, and the reading of their responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import Message

from bngrad._ahead.tensor import AheadTensor
from bngrad._errors import FieldViolation, invalid_argument
from bngrad._requests import codec
from bngrad._requests.arrays import as_arrays, as_output
from bngrad._requests.attributes import OneDnnAttributes, TensorFlowAttributes
from bngrad.typing import Array
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.fields import Buffer
from bngrad_wire.limits import MAX_PROTOBUF_NBYTES

SERVICE = pb.DESCRIPTOR.services_by_name["BatchNormGradService"].full_name
SERVER_INFO_METHOD = f"/{SERVICE}/ServerInfo"
EXCHANGE_METHOD = f"/{SERVICE}/Exchange"
SEND_AHEAD_METHOD = f"/{SERVICE}/SendAhead"

NO_TICKETS: Mapping[str, bytes] = MappingProxyType({})

_OPTIONAL = ("reserve_space_3", "gamma")

_CHANNELS_LAST = {"NCHW": ("NHWC", (4,)), "NCDHW": ("NDHWC", (5,)), "NCX": ("NXC", (3, 4, 5))}
"""For data formats with the channels second: the one with the channels last, and its numbers of dimensions."""

Attributes: TypeAlias = TensorFlowAttributes | OneDnnAttributes
Result = TypeVar("Result")


class OpSchema(Generic[Result]):
    """The messages of an op, whose result class has the name of its gRPC method.

    Attributes:
        method: The path of the gRPC method.
        number: The field number of the request, and of the response, in the messages of an exchange.
        tensors: The names of the request's tensors, in the order of their field numbers.
        large: Those of them that have the shape of x.
        fields: The field numbers of the request, by name.
        location_numbers: The numbers of the fields that say where the outputs of the shape of x go; these outputs are
            the response's first fields, in the same order.
        outputs: The names of the response's tensors.
        response: Reads the response.
        result: Makes the result from the response's tensors.
    """

    def __init__(self, result: type[Result], *, large: tuple[str, ...]) -> None:
        name = result.__name__
        request_type: type[Message] = getattr(pb, f"{name}Request")
        descriptor = request_type.DESCRIPTOR
        parts = pb.ExchangeRequest.DESCRIPTOR.fields
        self.method = f"/{SERVICE}/{name}"
        self.number = next(part.number for part in parts if part.message_type is descriptor)
        self.tensors = [field.name for field in descriptor.fields if field.message_type is pb.Tensor.DESCRIPTOR]
        self.large = large
        self.fields = {field.name: field.number for field in descriptor.fields}
        self.location_numbers = [number for field, number in self.fields.items() if field.endswith("_location")]
        response_type: type[Message] = getattr(pb, f"{name}Response")
        self.outputs = [field.name for field in response_type.DESCRIPTOR.fields]
        self.response = codec.ResponseReader(response_type, len(self.location_numbers))
        self.result = result
        self._request_type: Callable[..., Message] = request_type

    def prepare(self, tensors: Sequence[Any], attributes: Attributes, out: Any) -> PreparedRequest[Result]:
        """Checks and converts the arguments of a call.

        Args:
            tensors: One for each of the op's `tensors`; None for an optional one that is left out.
            attributes: The arguments that are not tensors.
            out: Where the caller wants the outputs of the shape of x: an array, a PyTorch tensor or None, or a pair of
                these for an op with two such outputs.

        Raises:
            TypeError: An argument has the wrong type.
            InvalidArgumentError: An argument has a value that the protocol cannot express.
        """
        checked = attributes.checked()
        named = zip(self.tensors, tensors, strict=True)
        given = {field: value for field, value in named if value is not None or field not in _OPTIONAL}
        arrays = as_arrays(given)
        ahead = {field: value for field, value in given.items() if isinstance(value, AheadTensor)}
        transposed = self._with_channels_last(checked, arrays)
        small = codec.to_wire_layout({**arrays, **transposed} if transposed else arrays)
        # The op ignores the elements of reserve_space_3, so they are not sent.
        ignored = small.pop("reserve_space_3", None)
        header = b""
        if ignored is not None:
            header = codec.header_piece(self.fields["reserve_space_3"], ignored.dtype, ignored.shape)
        large = dict(zip(self.large, map(small.pop, self.large), strict=True))
        others = {**large, **small}
        like = next(iter(large.values()))
        own = self._outputs(out)
        for name, output in own.items():
            if output is not None:
                _check_out(name, output, np.moveaxis(like, -1, 1) if transposed else like, others)
                others[name] = output
        rest = codec.attributes_piece(self._request_type, tuple(checked.items())) + header
        outputs = own_out = tuple(own.values())
        if transposed:
            outputs = tuple(output if output is None else np.moveaxis(output, 1, -1) for output in own_out)
        own_out_if_other = own_out if transposed else None
        return PreparedRequest(self, large, small, ignored, checked, rest, outputs, ahead, own_out_if_other)

    def _with_channels_last(self, attributes: dict[str, Any], arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns views with the channels last, and adapts the data format, if the memory has them so; else nothing."""
        data_format, ranks = _CHANNELS_LAST.get(attributes["data_format"], ("", ()))
        first = arrays[self.large[0]]
        if first.ndim not in ranks or first.flags.c_contiguous:
            return {}
        views = {field: np.moveaxis(arrays[field], 1, -1) for field in self.large if arrays[field].shape == first.shape}
        if len(views) < len(self.large) or not all(view.flags.c_contiguous for view in views.values()):
            return {}
        attributes["data_format"] = data_format
        return views

    def _outputs(self, out: Any) -> dict[str, Array | None]:
        """Returns where each output of the shape of x goes, by the name that errors give it."""
        if len(self.location_numbers) == 1:
            return {"out": as_output("out", out)}
        if out is not None and (not isinstance(out, tuple | list) or len(out) != 2):
            raise TypeError(f"out must be a pair of arrays, not {type(out).__name__}")
        return {f"out[{i}]": as_output(f"out[{i}]", each) for i, each in enumerate(out or (None, None))}


@dataclass(frozen=True, slots=True)
class PreparedRequest(Generic[Result]):
    """A request whose arguments were checked and converted.

    Attributes:
        op: The op's messages.
        large: The tensors of the shape of x by the names of their fields, in the order of these.
        small: The other tensors, likewise.
        ignored: reserve_space_3, if it was given.
        attributes: The fields that are not tensors.
        rest: These fields serialised, and reserve_space_3 without its elements.
        out: Where the caller wants each output of the shape of x; None for a new array.
        ahead: The handles of tensors that were sent ahead, by the names of their fields.
        own_out: ``out`` with the channels second, as the caller has them; None if ``out`` is what the caller has.
    """

    op: OpSchema[Result]
    large: dict[str, Array]
    small: dict[str, Array]
    ignored: Array | None
    attributes: dict[str, Any]
    rest: bytes
    out: tuple[Array | None, ...]
    ahead: dict[str, AheadTensor]
    own_out: tuple[Array | None, ...] | None = None

    @property
    def arrays(self) -> list[Array]:
        """The large tensors, and the caller's arrays for outputs."""
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
        """Returns the pieces of the message without the large tensors."""
        pieces: list[Buffer] = []
        for field, array in self.small.items():
            pieces += codec.tensor_pieces(self.op.fields[field], array)
        pieces.append(self.rest)
        return pieces

    def pieces(self) -> list[Buffer]:
        """Returns the pieces of the whole message.

        Raises:
            InvalidArgumentError: The tensors are too large for one message.
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

    def header_pieces(self, tickets: Mapping[str, bytes] = NO_TICKETS) -> list[Buffer]:
        """Returns the pieces of the message that starts an exchange; the large tensors without tickets follow it."""
        headers: list[Buffer] = []
        for field, array in self.large.items():
            number, ticket = self.op.fields[field], tickets.get(field)
            if ticket is None:
                headers.append(codec.header_piece(number, array.dtype, array.shape))
            else:
                headers.append(codec.ticket_piece(number, array.dtype, array.shape, ticket))
        return [*headers, *self.small_pieces()]

    def delivered(self, results: Sequence[Array]) -> list[Array]:
        """Copies the results of the shape of x to where the caller wants them; returns them where they are then."""
        delivered = []
        for result, out in zip(results, self.out, strict=True):
            if out is not None and out is not result:
                np.copyto(out, result)
            delivered.append(result if out is None else out)
        return delivered

    def read(self, response: bytes, outputs: Sequence[Array | None] = (), *, apart: bool = False) -> Result:
        """Makes the result from the response.

        Args:
            response: The response's message.
            outputs: Where to put each output of the shape of x; a new array for None or where none is given.
            apart: Whether these outputs came apart from the message, and are in place already.

        Raises:
            InternalError: The response is malformed.
        """
        return self.result(self.op.response.read(response, outputs, apart=apart))

    def result(self, tensors: dict[str, Array]) -> Result:
        """Makes the result from the response's tensors, with the channels where the caller has them."""
        for (field, array), own in zip(list(tensors.items()), self.own_out or (), strict=False):
            tensors[field] = np.moveaxis(array, -1, 1) if own is None else own
        return self.op.result(**tensors)


def in_wire_layout(x: Array) -> tuple[Array, Array]:
    """Returns a tensor as ops take it, and the same memory in C order, as it is sent; copies it if it is neither.

    Raises:
        InvalidArgumentError: The protocol does not have the dtype.
    """
    if not x.flags.c_contiguous and x.ndim in (3, 4, 5):
        with_channels_last = np.moveaxis(x, 1, -1)
        if with_channels_last.flags.c_contiguous:
            wire = codec.to_wire_layout({"x": with_channels_last})["x"]
            return np.moveaxis(wire, -1, 1), wire
    wire = codec.to_wire_layout({"x": x})["x"]
    return wire, wire


def _check_out(name: str, out: Array, like: Array, others: Mapping[str, Array]) -> None:
    """Checks an array for an output: dtype and shape, that it is writeable, and overlaps neither others nor itself."""
    problem = ""
    if (out.dtype, out.shape) != (like.dtype, like.shape):
        problem = f"must have shape {like.shape} of {like.dtype}, not {out.shape} of {out.dtype}"
    elif not out.flags.writeable:
        problem = "must be writeable"
    elif overlapped := [field for field, array in others.items() if np.may_share_memory(out, array)]:
        problem = f"must not overlap {overlapped[0]}"
    elif not _is_disjoint(out):
        problem = f"must have memory of its own for each element of shape {out.shape}, not strides {out.strides}"
    if problem:
        raise invalid_argument(FieldViolation(name, f"{name} {problem}"))


def _is_disjoint(array: Array) -> bool:
    """Returns whether no two elements share memory: each stride passes what the shorter ones reach.

    So it is with every view that slices and transposes make; also refused are strides that interleave elements.
    """
    if array.flags.c_contiguous:
        return True
    reached = array.itemsize
    for stride, length in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if length > 1:
            if stride < reached:
                return False
            reached += stride * (length - 1)
    return True
