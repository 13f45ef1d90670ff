"""The messages of an exchange: requests, and the chunks that hold the elements of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_server.codec.ops import OPS
from bngrad_wire import chunks, messages
from bngrad_wire.chunks import REQUEST_CHUNK, ChunkError, ChunkField, MessageSource
from bngrad_wire.fields import LEN, Buffer, FieldReader

CHUNK = REQUEST_CHUNK.number
"""The number of a chunk's field in requests and responses."""
_PARTS = REQUEST_CHUNK.parts
_OP_NUMBERS = frozenset(op.exchange_number for op in OPS)


def part_error(description: str) -> InvalidArgumentError:
    """Returns the error for a message that is out of order or has the wrong size."""
    return InvalidArgumentError((FieldViolation("part", description),))


def request_of(message: Buffer) -> tuple[int, Buffer]:
    """Returns the field number of the request in a message, which names its op, and the request's own bytes.

    Raises:
        InvalidArgumentError: The message holds no request.
        DecodeError: It is malformed, or exceeds the bounds of `bngrad_wire.fields`.
    """
    field = messages.only_field(message, len(message))
    if field is not None and field[0] in _OP_NUMBERS:
        return field[0], message[field[1] :]
    number, pieces = _part_of(message)
    if number not in _OP_NUMBERS:
        raise part_error(f"a request must come first, not {_PARTS.get(number, 'nothing')}")
    return number, b"".join([message[start:end] for start, end in pieces])


def _part_of(message: Buffer) -> tuple[int, list[tuple[int, int]]]:
    """Returns the number of a message's part, 0 for none, and where its pieces lie.

    As protobuf has it, the last part counts, and one that comes again is merged, which is to be read as one.
    """
    reader = FieldReader(message)
    part = 0
    pieces: list[tuple[int, int]] = []
    try:
        for number, wire_type, begin, start, end in reader.fields(0, len(message)):
            if number not in _PARTS or wire_type != LEN:
                reader.skip(begin, end)
                continue
            if number != part:
                part, pieces = number, []
            pieces.append((start, end))
    except DecodeError as error:
        raise DecodeError(f"the message is no ExchangeRequest: {error}") from error
    return part, pieces


def whole_chunks(parts: Sequence[Buffer], nbytes: int) -> list[memoryview]:
    """Returns the elements of tensors of this size, each in one of the messages; none if any message is another."""
    elements = []
    for part in parts:
        field = messages.only_field(part, len(part))
        if field is None or field[0] != CHUNK or len(part) - field[1] != nbytes:
            return []
        elements.append(memoryview(part)[field[1] :])
    return elements


def receive_chunks(
    source: MessageSource, chunk: ChunkField, target: memoryview, short_chunk: Callable[[], None]
) -> None:
    """Fills the memory of a tensor from the next messages, see `bngrad_wire.chunks.receive`.

    Raises:
        InvalidArgumentError: A chunk is missing or too long, or a message is no chunk.
    """
    try:
        chunks.receive(source, chunk, target, short_chunk)
    except ChunkError as error:
        field = "part" if chunk is REQUEST_CHUNK else "chunk"
        raise InvalidArgumentError((FieldViolation(field, str(error)),)) from error
