"""Reads and writes messages that hold tensors, without copying the elements.

The generated classes copy every element at least once, so they handle everything except the elements. The bytes on the
wire are exactly protobuf's: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.fields import (
    LEN,
    MAX_CHUNK_FIELDS,
    MAX_LENGTH_NBYTES,
    MAX_NBYTES,
    MAX_TAG_NBYTES,
    FieldReader,
    TruncatedError,
    read_varint,
)

Buffer: TypeAlias = bytes | bytearray | memoryview

AnyMessage = TypeVar("AnyMessage", bound=Message)
Meaning = TypeVar("Meaning")

_Skeleton: TypeAlias = tuple[tuple[int, int, bytes], ...]
"""The pieces between the elements of a message: start, end and bytes of each."""

_DATA_FIELD = pb.Tensor.DESCRIPTOR.fields_by_name["data"].number
PARTS = {field.number: field.name for field in pb.ExchangeRequest.DESCRIPTOR.oneofs_by_name["part"].fields}
"""The fields of an exchange's messages, of which each has one; the same for requests and responses."""

PREFIX_NBYTES = 6
"""How much of a message `only_field` needs, in bytes."""
_HEAD_NBYTES = MAX_NBYTES + MAX_TAG_NBYTES + MAX_LENGTH_NBYTES
"""How much of a message must be seen to find its chunk, if it has other fields too."""

_COPIED_WITH_LOCK_NBYTES = 32 * 1024
"""Larger copies release the interpreter's lock, which has a cost of its own."""

_LAYOUTS_PER_LENGTH = 4
_MAX_LENGTHS = 128
_MAX_CACHED_NBYTES = 1024


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where the elements of a tensor lie in a message.

    Attributes:
        header: The tensor without its elements.
        start: The offset of the elements in the message, in bytes.
        nbytes: The size of the elements.
    """

    header: pb.Tensor
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout(Generic[AnyMessage]):
    """A message without the elements of its tensors.

    Attributes:
        message: The message, its tensors without elements.
        tensors: The tensors that are present, by field name.
    """

    message: AnyMessage
    tensors: Mapping[str, TensorSpan]


class Decoder(Generic[AnyMessage, Meaning]):
    """Reads messages of one type.

    Messages that differ in their elements alone have the same meaning, so the last meanings are cached. The bounds of
    `bngrad_wire.fields` hold, for the cache too: no sequence of messages fills it with more than a few megabytes.
    """

    def __init__(self, message_type: type[AnyMessage], interpret: Callable[[Layout[AnyMessage]], Meaning]) -> None:
        """Reads none yet; ``interpret`` returns what the messages of a layout mean, or raises an error of its own."""
        self._type = message_type
        self._interpret = interpret
        self._tensor_fields = {
            field.number: field.name
            for field in message_type.DESCRIPTOR.fields
            if field.message_type is pb.Tensor.DESCRIPTOR
        }
        self._cache: dict[int, tuple[tuple[_Skeleton, Meaning], ...]] = {}
        self._mutex = threading.Lock()

    def decode(self, data: bytes) -> Meaning:
        """Returns what a message means.

        Raises:
            DecodeError: Protobuf would reject the message as malformed, or it exceeds the bounds.
        """
        meaning = self.known(data)
        return self._read(data) if meaning is None else meaning

    def known(self, data: Buffer) -> Meaning | None:
        """Returns what a message means if that is cached, at next to no cost."""
        for skeleton, meaning in self._cache.get(len(data), ()):
            for start, end, piece in skeleton:
                if data[start:end] != piece:
                    break
            else:
                return meaning
        return None

    def check_beginning(self, beginning: bytes, nbytes: int) -> None:
        """Checks the first bytes of a message of ``nbytes``, so that the rest of a bad one need not be received.

        Raises:
            DecodeError: Whatever follows, the message is malformed, or exceeds the bounds.
        """
        with suppress(TruncatedError):
            self._split(beginning, nbytes)

    def _read(self, data: bytes) -> Meaning:
        layout, skeleton = self._parse(data)
        meaning = self._interpret(layout)
        if sum(len(piece) for _, _, piece in skeleton) <= _MAX_CACHED_NBYTES:
            with self._mutex:
                if len(data) not in self._cache and len(self._cache) >= _MAX_LENGTHS:
                    del self._cache[next(iter(self._cache))]
                known = self._cache.get(len(data), ())
                self._cache[len(data)] = ((skeleton, meaning), *known[: _LAYOUTS_PER_LENGTH - 1])
        return meaning

    def _parse(self, data: bytes) -> tuple[Layout[AnyMessage], _Skeleton]:
        """Splits off the elements, and parses the rest with protobuf, which merges fields that come twice."""
        pieces, elements, skeleton = self._split(data, len(data))
        message = self._type.FromString(b"".join(pieces))
        tensors = {
            name: TensorSpan(getattr(message, name), start, end - start) for name, (start, end) in elements.items()
        }
        return Layout(message, tensors), skeleton

    def _split(self, data: bytes, nbytes: int) -> tuple[list[bytes], dict[str, tuple[int, int]], _Skeleton]:
        """Returns the message without its elements, where the elements of each tensor lie, and what is between them."""
        reader = FieldReader(data)
        pieces: list[bytes] = []
        elements: dict[str, tuple[int, int]] = {}
        skeleton, seen = [], 0
        for number, wire_type, begin, start, end in reader.fields(0, nbytes):
            name = self._tensor_fields.get(number) if wire_type == LEN else None
            if name is None:
                pieces.append(reader.take(begin, end))
                continue
            elements.setdefault(name, (0, 0))
            header = []
            for inner, inner_type, inner_begin, inner_start, inner_end in reader.fields(start, end):
                if inner == _DATA_FIELD and inner_type == LEN:
                    elements[name] = (inner_start, inner_end)
                    skeleton.append((seen, inner_start, data[seen:inner_start]))
                    seen = inner_end
                else:
                    header.append(reader.take(inner_begin, inner_end))
            pieces += (field_prefix(number, sum(map(len, header))), *header)
        skeleton.append((seen, nbytes, data[seen:]))
        return pieces, elements, tuple(skeleton)


def tensor_prefix(number: int, header: pb.Tensor, nbytes: int) -> bytes:
    """Returns what precedes a tensor's elements: tag and length of the field, header, tag and length of these."""
    inner = header.SerializeToString()
    if nbytes:
        inner += field_prefix(_DATA_FIELD, nbytes)
    return field_prefix(number, len(inner) + nbytes) + inner


@functools.lru_cache(maxsize=1024)
def field_prefix(number: int, nbytes: int) -> bytes:
    """Returns what precedes the content of a length-delimited field: its tag and length."""
    return _varint(number << 3 | LEN) + _varint(nbytes)


def chunks(number: int, data: Buffer, chunk_nbytes: int) -> Iterator[list[Buffer]]:
    """Yields messages, in pieces, each with the next bytes of ``data`` as its only field."""
    for start in range(0, len(data), chunk_nbytes):
        chunk = data[start : start + chunk_nbytes]
        yield [field_prefix(number, len(chunk)), chunk]


def only_field(data: Buffer, nbytes: int) -> tuple[int, int] | None:
    """Returns the number of the length-delimited field that fills a message, and where its content begins.

    Args:
        data: The message, or at least its first `PREFIX_NBYTES`.
        nbytes: The size of the whole message.

    Returns:
        None if the message is anything else.
    """
    if len(data) < 2 or data[0] & 7 != LEN or not 0x07 < data[0] < 0x80:
        return None
    try:
        length, start = read_varint(data, 1, len(data), 5)
    except DecodeError:
        return None
    return (data[0] >> 3, start) if start + length == nbytes else None


class ChunkError(Exception):
    """The messages of a stream are not the chunks of a tensor; says what is wrong with them."""


class MessageSource(Protocol):
    """The messages of a stream, one after the other, such as a call of `bngrad_wire.http2`."""

    def receive_message(self) -> int | None:
        """Waits for the next message and returns its size in bytes; None at the end of the stream."""

    def read(self, nbytes: int, beginning: bytes = b"") -> bytes:
        """Returns the next bytes of the message after ``beginning``, which was read before."""

    def read_into(self, buffer: memoryview) -> None:
        """Fills a buffer with the next bytes of the message."""


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

    def read(self, nbytes: int, beginning: bytes = b"") -> bytes:
        """See `MessageSource`."""
        data, self._rest = bytes(self._rest[:nbytes]), self._rest[nbytes:]
        return beginning + data

    def read_into(self, buffer: memoryview) -> None:
        """See `MessageSource`."""
        data, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        copy(buffer, data)


def receive_chunks(source: MessageSource, number: int, target: memoryview) -> None:
    """Fills a buffer with the chunks of the next messages; their bytes are read straight into it.

    Args:
        source: The messages.
        number: The number of the field that holds a chunk.
        target: What to fill; of format "B".

    Raises:
        ChunkError: A chunk is missing or too long, or a message is no chunk.
    """
    start = 0
    while start < len(target):
        nbytes = source.receive_message()
        if nbytes is None:
            raise ChunkError(f"{len(target) - start} bytes of chunks are missing")
        rest_prefix = field_prefix(number, len(target) - start)
        head = source.read(min(nbytes, len(rest_prefix)))
        if head == rest_prefix and nbytes == len(head) + len(target) - start:  # one chunk has all that is missing
            source.read_into(target[start:])
            return
        head += source.read(max(min(nbytes, PREFIX_NBYTES) - len(head), 0))
        field = only_field(head, nbytes)
        if field is not None and field[0] == number:
            first, chunk_nbytes, rest_nbytes = head[field[1] :], nbytes - field[1], 0
        else:
            head += source.read(min(nbytes, _HEAD_NBYTES) - len(head))
            chunk_start, chunk_end = _chunk_in(head, number, nbytes)
            first, chunk_nbytes, rest_nbytes = head[chunk_start:], chunk_end - chunk_start, nbytes - chunk_end
        end = start + chunk_nbytes
        if end > len(target):
            raise ChunkError(f"a chunk has {end - len(target)} bytes more than its tensor")
        first, rest = first[:chunk_nbytes], first[chunk_nbytes:]
        copy(target[start : start + len(first)], first)
        if len(first) < chunk_nbytes:
            source.read_into(target[start + len(first) : end])
        if rest_nbytes:
            _check_no_part(rest + source.read(rest_nbytes - len(rest)))
        start = end


def _chunk_in(head: bytes, number: int, nbytes: int) -> tuple[int, int]:
    """Returns where the chunk lies in a message with other fields, which begins with ``head``."""
    reader = FieldReader(head, MAX_CHUNK_FIELDS)
    try:
        for field, wire_type, begin, start, end in reader.fields(0, nbytes):
            if field == number and wire_type == LEN:
                reader.skip(begin, start)
                reader.skip(end, nbytes)
                return start, end
            if field in PARTS and wire_type == LEN:
                raise ChunkError(f"a chunk must follow, not {PARTS[field]}")
            reader.skip(begin, end)
    except DecodeError as error:
        raise ChunkError(str(error)) from error
    raise ChunkError("a chunk must follow, not nothing")


def _check_no_part(rest: bytes) -> None:
    """Checks what follows a chunk in its message."""
    try:
        for field, wire_type, *_ in FieldReader(rest, MAX_CHUNK_FIELDS).fields(0, len(rest)):
            if field in PARTS and wire_type == LEN:
                raise ChunkError(f"a chunk must be the only part of its message, not beside {PARTS[field]}")
    except DecodeError as error:
        raise ChunkError(str(error)) from error


def copy(target: memoryview, source: Buffer) -> None:
    """Copies bytes from one buffer to another of the same size."""
    if target.nbytes <= _COPIED_WITH_LOCK_NBYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
