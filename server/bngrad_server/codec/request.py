"""A valid request: what to compute, and where the elements of its tensors are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError, Spec
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import Op
from bngrad_server.memory.layout import Sizes
from bngrad_server.scheduling.job import KernelKey
from bngrad_wire import messages
from bngrad_wire.fields import Buffer

Source: TypeAlias = slice | pb.Location | bytes | None
"""Where a tensor's elements are: in the message, in a shared region, in the tensor of a ticket, sent ahead, or (None)
in chunks that follow."""


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """A valid request without its elements; requests that differ only in their elements share one.

    Attributes:
        op: The op.
        transport: How its elements travel, see `bngrad_server.codec.ops.TRANSPORTS`.
        series: The index of op and transport in `bngrad_server.codec.ops.SERIES`.
        spec: What to compute.
        sizes: The sizes of its tensors in memory.
        kernel_key: See `bngrad_server.scheduling.job.Job`.
        priority: See `bngrad_server.scheduling.job.Job`.
        large_inputs: Where the elements of the inputs of the shape of x are, in the op's order.
        tickets: The tickets of those of them that lie in shared regions, empty for those without, in the same order.
        small_inputs: Where the elements of the 1-D inputs are, in the op's order; None stands for ones.
        locations: Where to write the outputs of the shape of x, in the op's order; None for those to be sent.
        chunked: Whether the elements of the large tensors travel in chunks, apart from request and response.
        chunk_order: The indexes of the large inputs, in the order of their field numbers.
        response: The bytes of the response before each output, and those after the last one.
        tensor_count: How many tensors of the shape of x it has, with the outputs.
        tensors_nbytes: Their size.
        new_nbytes: The size of those of them that were not sent ahead.
        response_nbytes: The most bytes that the messages of the response take, with all their prefixes.
    """

    op: Op
    transport: str
    series: int
    spec: Spec
    sizes: Sizes
    kernel_key: KernelKey
    priority: int
    large_inputs: tuple[Source, ...]
    tickets: tuple[bytes, ...]
    small_inputs: tuple[slice | None, ...]
    locations: tuple[pb.Location | None, ...]
    chunked: bool
    chunk_order: tuple[int, ...]
    response: tuple[bytes, ...]
    tensor_count: int
    tensors_nbytes: int
    new_nbytes: int
    response_nbytes: int

    def response_pieces(self, outputs: Sequence[Buffer]) -> list[Buffer]:
        """Returns the response with these outputs, in pieces; those that travel in chunks are empty."""
        *prefixes, tail = self.response
        return [*itertools.chain.from_iterable(zip(prefixes, outputs, strict=True)), tail]

    def exchange_pieces(self, response: Sequence[Buffer]) -> list[Buffer]:
        """Returns the message of an exchange with this response, in pieces."""
        return [messages.field_prefix(self.op.exchange_number, sum(map(len, response))), *response]


class InvalidRequestError(InvalidArgumentError):
    """A request that was read and is invalid.

    Attributes:
        transport: How its elements travel, see `bngrad_server.codec.ops.TRANSPORTS`.
    """

    def __init__(self, violations: tuple[FieldViolation, ...], transport: str) -> None:
        super().__init__(violations)
        self.transport = transport
