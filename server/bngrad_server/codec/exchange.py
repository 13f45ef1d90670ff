"""The messages of an exchange: requests, and the chunks that hold the elements of their tensors."""

from __future__ import annotations

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS
from bngrad_wire import messages
from bngrad_wire.messages import ChunkError, MessageSource

CHUNK = pb.ExchangeRequest.CHUNK_FIELD_NUMBER
"""The number of a chunk's field in requests and responses."""
_OP_NUMBERS = frozenset(op.exchange_number for op in OPS)


def part_error(description: str) -> InvalidArgumentError:
    """Returns the error for a message that is out of order or has the wrong size."""
    return InvalidArgumentError((FieldViolation("part", description),))


def request_of(message: bytes) -> tuple[int, bytes]:
    """Returns the field number of the request in a message, which names its op, and the request's own bytes.

    Raises:
        InvalidArgumentError: The message holds no request.
        DecodeError: It is malformed.
    """
    field = messages.only_field(message, len(message))
    if field is not None and field[0] in _OP_NUMBERS:
        return field[0], message[field[1] :]
    parsed = pb.ExchangeRequest.FromString(message)
    part = parsed.WhichOneof("part")
    if part in (None, "chunk"):
        raise part_error(f"a request must come first, not {part or 'nothing'}")
    assert part is not None
    return parsed.DESCRIPTOR.fields_by_name[part].number, getattr(parsed, part).SerializeToString()


def receive_chunks(source: MessageSource, target: memoryview, max_message_nbytes: int) -> None:
    """Fills the memory of a tensor from the next messages.

    Args:
        source: The messages.
        target: The memory.
        max_message_nbytes: The largest message to read whole, if it holds more than its chunk.

    Raises:
        InvalidArgumentError: A chunk is missing or too long, or a message is no chunk.
        DecodeError: A message is malformed.
    """
    try:
        messages.receive_chunks(source, CHUNK, target, parse=_chunk_of, max_parsed_nbytes=max_message_nbytes)
    except ChunkError as error:
        raise part_error(str(error)) from error


def _chunk_of(message: bytes) -> bytes:
    parsed = pb.ExchangeRequest.FromString(message)
    part = parsed.WhichOneof("part")
    if part != "chunk":
        raise part_error(f"a chunk must follow, not {part or 'nothing'}")
    return parsed.chunk
