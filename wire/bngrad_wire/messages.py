"""Reads and writes messages that hold tensors, without copying the elements.

The generated classes copy every element at least once, so they handle everything except the elements. The bytes on the
wire are exactly protobuf's: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.limits import MAX_PROTOBUF_NBYTES

Buffer: TypeAlias = bytes | bytearray | memoryview

AnyMessage = TypeVar("AnyMessage", bound=Message)

_VARINT, _FIXED64, _LEN, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_DATA_FIELD = pb.Tensor.DESCRIPTOR.fields_by_name["data"].number

PREFIX_NBYTES = 6
"""How much of a message `only_field` needs, in bytes."""

_MAX_DEPTH = 100
"""Protobuf's limit for nested groups."""
_MAX_FIELD_NUMBER = 2**29 - 1
_MAX_VARINT = 2**64 - 1
"""Higher bits of a tenth byte are ignored, as by protobuf."""

_COPIED_WITH_LOCK_NBYTES = 32 * 1024
"""Larger copies release the interpreter's lock, which has a cost of its own."""

_LAYOUTS_PER_LENGTH = 4
_MAX_LENGTHS = 256
_MAX_CACHED_NBYTES = 16 * 1024


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


@dataclass(frozen=True, eq=False, slots=True)
class Layout(Generic[AnyMessage]):
    """A message without the elements of its tensors.

    Messages that differ in their elements alone share a layout, so it may be the key of a cache.

    Attributes:
        message: The message, its tensors without elements.
        tensors: The tensors that are present, by field name.
        skeleton: The pieces between the elements: start, end and bytes of each.
    """

    message: AnyMessage
    tensors: Mapping[str, TensorSpan]
    skeleton: tuple[tuple[int, int, bytes], ...]

    @property
    def is_small(self) -> bool:
        """Whether it is small enough to be cached: large ones could exhaust the memory."""
        return sum(len(piece) for _, _, piece in self.skeleton) <= _MAX_CACHED_NBYTES

    def matches(self, data: bytes) -> bool:
        """Whether a message of the same length has this layout."""
        return all(data[start:end] == piece for start, end, piece in self.skeleton)


class Decoder(Generic[AnyMessage]):
    """Parses messages of one type into layouts, with a cache of the last layouts."""

    def __init__(self, message_type: type[AnyMessage]) -> None:
        self._type = message_type
        self._tensor_fields = {
            field.number: field.name
            for field in message_type.DESCRIPTOR.fields
            if field.message_type is pb.Tensor.DESCRIPTOR
        }
        self._cache: dict[int, list[Layout[AnyMessage]]] = {}

    def decode(self, data: bytes) -> Layout[AnyMessage]:
        """Returns the layout of a message.

        Raises:
            DecodeError: Protobuf would reject the message as malformed.
        """
        known = self._cache.get(len(data), ())
        for layout in known:
            if layout.matches(data):
                return layout
        layout = self._parse(data)
        if not layout.is_small:
            return layout
        if len(self._cache) >= _MAX_LENGTHS:
            self._cache.clear()
        self._cache[len(data)] = [layout, *known][:_LAYOUTS_PER_LENGTH]
        return layout

    def _parse(self, data: bytes) -> Layout[AnyMessage]:
        """Splits off the elements, and parses the rest with protobuf, which merges fields that come twice."""
        pieces: list[bytes] = []
        elements: dict[str, tuple[int, int]] = {}
        for number, wire_type, begin, start, end in _fields(data, 0, len(data)):
            name = self._tensor_fields.get(number) if wire_type == _LEN else None
            if name is None:
                pieces.append(data[begin:end])
                continue
            elements.setdefault(name, (0, 0))
            header = []
            for inner, inner_type, inner_begin, inner_start, inner_end in _fields(data, start, end):
                if inner == _DATA_FIELD and inner_type == _LEN:
                    elements[name] = (inner_start, inner_end)
                else:
                    header.append(data[inner_begin:inner_end])
            pieces += (field_prefix(number, sum(map(len, header))), *header)
        message = self._type.FromString(b"".join(pieces))
        tensors = {
            name: TensorSpan(getattr(message, name), start, end - start) for name, (start, end) in elements.items()
        }
        return Layout(message, tensors, _skeleton(data, elements.values()))


def tensor_prefix(number: int, header: pb.Tensor, nbytes: int) -> bytes:
    """Returns what precedes a tensor's elements: tag and length of the field, header, tag and length of these."""
    inner = header.SerializeToString()
    if nbytes:
        inner += field_prefix(_DATA_FIELD, nbytes)
    return field_prefix(number, len(inner) + nbytes) + inner


def field_prefix(number: int, nbytes: int) -> bytes:
    """Returns what precedes the content of a length-delimited field: its tag and length."""
    return _tag(number, _LEN) + _varint(nbytes)


def chunks(number: int, data: memoryview, chunk_nbytes: int) -> Iterator[list[Buffer]]:
    """Yields messages, in pieces, each with the next bytes of ``data``, of format "B", as its only field."""
    for start in range(0, len(data), chunk_nbytes):
        chunk = data[start : start + chunk_nbytes]
        yield [field_prefix(number, len(chunk)), chunk]


def only_field(data: bytes, nbytes: int) -> tuple[int, int] | None:
    """Returns the number of the length-delimited field that fills a message, and where its content begins.

    Args:
        data: The message, or at least its first `PREFIX_NBYTES`.
        nbytes: The size of the whole message.

    Returns:
        None if the message is anything else.
    """
    if len(data) < 2 or data[0] & 7 != _LEN or not 0x07 < data[0] < 0x80:
        return None
    try:
        length, start = _read_varint(data, 1, len(data), 5)
    except DecodeError:
        return None
    return (data[0] >> 3, start) if start + length == nbytes else None


class ChunkError(Exception):
    """The messages of a stream are not the chunks of a tensor; says what is wrong with them."""


class MessageSource(Protocol):
    """The messages of a stream, one after the other, such as a call of `bngrad_wire.http2`."""

    def receive_message(self) -> int | None:
        """Waits for the next message and returns its size in bytes; None at the end of the stream."""

    def read(self, nbytes: int) -> bytes:
        """Returns the next bytes of the message."""

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

    def read(self, nbytes: int) -> bytes:
        """See `MessageSource`."""
        data, self._rest = bytes(self._rest[:nbytes]), self._rest[nbytes:]
        return data

    def read_into(self, buffer: memoryview) -> None:
        """See `MessageSource`."""
        data, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        copy(buffer, data)


def receive_chunks(
    source: MessageSource,
    number: int,
    target: memoryview,
    *,
    parse: Callable[[bytes], Buffer] | None = None,
    max_parsed_nbytes: int = MAX_PROTOBUF_NBYTES,
) -> None:
    """Fills a buffer with the chunks of the next messages; their bytes are read straight into it.

    Args:
        source: The messages.
        number: The number of the field that holds a chunk.
        target: What to fill; of format "B".
        parse: Returns the chunk of a message that has other fields too, or raises an error of its own; None if such
            messages are errors.
        max_parsed_nbytes: The largest message that is read whole, to be parsed.

    Raises:
        ChunkError: A chunk is missing or too long, or a message is no chunk.
    """
    first: Buffer
    start = 0
    while start < len(target):
        nbytes = source.receive_message()
        if nbytes is None:
            raise ChunkError(f"{len(target) - start} bytes of chunks are missing")
        head = source.read(min(nbytes, PREFIX_NBYTES))
        field = only_field(head, nbytes)
        if field is not None and field[0] == number:
            first, chunk_nbytes = head[field[1] :], nbytes - field[1]
        elif parse is not None and nbytes <= max_parsed_nbytes:
            first = parse(head + source.read(nbytes - len(head)))
            chunk_nbytes = len(first)
        else:
            raise ChunkError("a chunk must be the only field of its message")
        end = start + chunk_nbytes
        if end > len(target):
            raise ChunkError(f"a chunk has {end - len(target)} bytes more than its tensor")
        copy(target[start : start + len(first)], first)
        if len(first) < chunk_nbytes:
            source.read_into(target[start + len(first) : end])
        start = end


def copy(target: memoryview, source: Buffer) -> None:
    """Copies bytes from one buffer to another of the same size."""
    if target.nbytes <= _COPIED_WITH_LOCK_NBYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _skeleton(data: bytes, elements: Any) -> tuple[tuple[int, int, bytes], ...]:
    pieces, begin = [], 0
    for start, end in sorted(elements):
        pieces.append((begin, start, data[begin:start]))
        begin = end
    pieces.append((begin, len(data), data[begin:]))
    return tuple(pieces)


def _fields(data: bytes, position: int, end: int) -> list[tuple[int, int, int, int, int]]:
    """Returns the fields of a message: number, wire type, start, start of the content, end."""
    fields = []
    while position < end:
        begin = position
        number, wire_type, position = _read_tag(data, position, end)
        start, position = _content(data, number, wire_type, position, end)
        fields.append((number, wire_type, begin, start, position))
    return fields


def _content(data: bytes, number: int, wire_type: int, position: int, end: int, depth: int = 0) -> tuple[int, int]:
    """Returns start and end of the content of a field whose tag ends at ``position``."""
    start = position
    if wire_type == _VARINT:
        _, position = _read_varint(data, position, end, 10)
    elif wire_type == _LEN:
        nbytes, start = _read_varint(data, position, end, 10)
        position = start + nbytes
    elif wire_type == _FIXED64:
        position += 8
    elif wire_type == _FIXED32:
        position += 4
    elif wire_type == _START_GROUP:
        position = _group_end(data, number, position, end, depth + 1)
    else:
        raise DecodeError(f"field {number} has wire type {wire_type} at byte {start}")
    if position > end:
        raise DecodeError(
            f"field {number} ends at byte {position}, after the message that holds it, which ends at {end}"
        )
    return start, position


def _group_end(data: bytes, group: int, position: int, end: int, depth: int) -> int:
    if depth > _MAX_DEPTH:
        raise DecodeError(f"groups are nested more than {_MAX_DEPTH} deep")
    while True:
        number, wire_type, position = _read_tag(data, position, end)
        if wire_type == _END_GROUP:
            if number != group:
                raise DecodeError(f"group {group} is ended as group {number}")
            return position
        _, position = _content(data, number, wire_type, position, end, depth)


def _read_tag(data: bytes, position: int, end: int) -> tuple[int, int, int]:
    tag, position = _read_varint(data, position, end, 5)
    number = tag >> 3
    if not 0 < number <= _MAX_FIELD_NUMBER:
        raise DecodeError(f"there is no field number {number}")
    return number, tag & 7, position


def _read_varint(data: bytes, position: int, end: int, max_bytes: int) -> tuple[int, int]:
    value = shift = 0
    for at in range(position, min(end, position + max_bytes)):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MAX_VARINT, at + 1
        shift += 7
    raise DecodeError(f"the varint at byte {position} has no end")


@functools.lru_cache(maxsize=256)
def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
