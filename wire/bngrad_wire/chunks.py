"""Sends and receives the elements of a tensor as the chunks of a stream's messages, read straight to their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from google.protobuf.message import DecodeError, Message

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.fields import LEN, MAX_CHUNK_FIELDS, MAX_LENGTH_NBYTES, MAX_NBYTES, MAX_TAG_NBYTES, Buffer, FieldReader
from bngrad_wire.messages import PREFIX_NBYTES, field_prefix, only_field

_HEAD_NBYTES = MAX_NBYTES + MAX_TAG_NBYTES + MAX_LENGTH_NBYTES
"""How much of a message must be seen to find its chunk, if it has other fields too."""

SHORT_NBYTES = 256
"""Chunks of fewer bytes are short: to receive their elements costs little beside their messages."""
_COPIED_WITH_LOCK_NBYTES = 32 * 1024
"""Larger copies release the interpreter's lock, which has a cost of its own."""


class ChunkError(Exception):
    """The messages of a stream are not the chunks of a tensor; says what is wrong with them."""


class ChunkField(NamedTuple):
    """The field of a stream's messages that holds a chunk.

    Attributes:
        number: Its number.
        parts: The names of the fields of which a message with a chunk has only one, by their numbers.
        may_lack: Whether a message without it has an empty chunk.
    """

    number: int
    parts: dict[int, str]
    may_lack: bool

    @classmethod
    def of(cls, message: type[Message]) -> ChunkField:
        """Returns the field of messages of this type."""
        chunk = message.DESCRIPTOR.fields_by_name["chunk"]
        parts = {field.number: field.name for field in message.DESCRIPTOR.fields}
        return cls(chunk.number, parts, may_lack=not chunk.has_presence)


REQUEST_CHUNK = ChunkField.of(pb.ExchangeRequest)
RESPONSE_CHUNK = ChunkField.of(pb.ExchangeResponse)
AHEAD_CHUNK = ChunkField.of(pb.SendAheadRequest)


class MessageSource(Protocol):
    """The messages of a stream, one after the other, such as a call of `bngrad_wire.http2`."""

    def receive_message(self) -> int | None:
        """Waits for the next message and returns its size in bytes; None at the end of the stream."""

    def read(self, nbytes: int) -> bytes:
        """Returns the next bytes of the message."""

    def read_into(self, buffer: memoryview) -> None:
        """Fills a buffer with the next bytes of the message."""

    def took_chunk(self) -> None:
        """Is told that the message brought elements of a tensor."""


class WholeMessages:
    """A `MessageSource` whose messages arrive whole, as from grpcio."""

    def __init__(self, receive: Callable[[], bytes | None]) -> None:
        """Reads from a stream; ``receive`` waits for its next message, and returns None at its end."""
        self._receive = receive
        self._rest = memoryview(b"")

    def receive_message(self) -> int | None:
        """See `MessageSource`."""
        self._rest = memoryview(b"")  # or the message before would take memory while this one is waited for
        message = self._receive()
        if message is None:
            return None
        self._rest = memoryview(message)
        return len(message)

    def read(self, nbytes: int) -> bytes:
        """See `MessageSource`."""
        data, self._rest = bytes(self._rest[:nbytes]), self._rest[nbytes:]
        return data

    def read_into(self, buffer: memoryview) -> None:
        """See `MessageSource`."""
        data, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        copy(buffer, data)

    def took_chunk(self) -> None:
        """See `MessageSource`."""


def split(number: int, data: Buffer, chunk_nbytes: int) -> Iterator[list[Buffer]]:
    """Yields messages, in pieces, each with the next bytes of ``data`` as its only field."""
    for start in range(0, len(data), chunk_nbytes):
        chunk = data[start : start + chunk_nbytes]
        yield [field_prefix(number, len(chunk)), chunk]


def receive(
    source: MessageSource, chunk: ChunkField, target: memoryview, short_chunk: Callable[[], None] | None = None
) -> None:
    """Fills a buffer with the chunks of the next messages; their bytes are read straight into it.

    Args:
        source: The messages.
        chunk: The field that holds a chunk, such as `REQUEST_CHUNK`.
        target: What to fill; of format "B".
        short_chunk: Called after each chunk that is short.

    Raises:
        ChunkError: A chunk is missing or too long, or a message is no chunk.
    """
    start, number = 0, chunk.number
    while start < len(target):
        nbytes = source.receive_message()
        if nbytes is None:
            raise ChunkError(f"{len(target) - start} bytes of chunks are missing")
        rest_prefix = field_prefix(number, len(target) - start)
        head = source.read(min(nbytes, len(rest_prefix)))
        if head == rest_prefix and nbytes == len(head) + len(target) - start:  # one chunk has all that is missing
            source.read_into(target[start:])
            source.took_chunk()
            return
        head += source.read(max(min(nbytes, PREFIX_NBYTES) - len(head), 0))
        field = only_field(head, nbytes)
        if field is not None and field[0] == number:
            first, chunk_nbytes, rest_nbytes = head[field[1] :], nbytes - field[1], 0
        else:
            head += source.read(min(nbytes, _HEAD_NBYTES) - len(head))
            chunk_start, chunk_end = _chunk_in(head, chunk, nbytes)
            first, chunk_nbytes, rest_nbytes = head[chunk_start:], chunk_end - chunk_start, nbytes - chunk_end
        end = start + chunk_nbytes
        if end > len(target):
            raise ChunkError(f"a chunk has {end - len(target)} bytes more than its tensor")
        first, rest = first[:chunk_nbytes], first[chunk_nbytes:]
        copy(target[start : start + len(first)], first)
        if len(first) < chunk_nbytes:
            source.read_into(target[start + len(first) : end])
        if rest_nbytes:
            _check_no_part(rest + source.read(rest_nbytes - len(rest)), chunk)
        if chunk_nbytes:
            source.took_chunk()
        if short_chunk is not None and chunk_nbytes < SHORT_NBYTES:
            short_chunk()
        start = end


def _chunk_in(head: bytes, chunk: ChunkField, nbytes: int) -> tuple[int, int]:
    """Returns where the chunk lies in a message with other fields, which begins with ``head``."""
    reader = FieldReader(head, MAX_CHUNK_FIELDS)
    try:
        for field, wire_type, begin, start, end in reader.fields(0, nbytes):
            if field == chunk.number and wire_type == LEN:
                reader.skip(begin, start)
                reader.skip(end, nbytes)
                return start, end
            if field in chunk.parts and wire_type == LEN:
                raise ChunkError(f"a chunk must follow, not {chunk.parts[field]}")
            reader.skip(begin, end)
    except DecodeError as error:
        raise ChunkError(str(error)) from error
    if chunk.may_lack:
        return nbytes, nbytes
    raise ChunkError("a chunk must follow, not nothing")


def _check_no_part(rest: bytes, chunk: ChunkField) -> None:
    """Checks what follows a chunk in its message."""
    try:
        for field, wire_type, *_ in FieldReader(rest, MAX_CHUNK_FIELDS).fields(0, len(rest)):
            if field in chunk.parts and wire_type == LEN:
                raise ChunkError(f"a chunk must be the only part of its message, not beside {chunk.parts[field]}")
    except DecodeError as error:
        raise ChunkError(str(error)) from error


def copy(target: memoryview, source: Buffer) -> None:
    """Copies bytes from one buffer to another of the same size."""
    if target.nbytes <= _COPIED_WITH_LOCK_NBYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
