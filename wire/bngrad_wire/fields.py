"""Finds the fields of a protobuf message without parsing their contents, within bounds.

Whatever a message of any size holds, to read it costs no more than to read one of `MAX_FIELDS` fields and
`MAX_NBYTES` bytes. The format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from google.protobuf.message import DecodeError

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes to send; a memoryview is C-contiguous and of format "B"."""
Field: TypeAlias = tuple[int, int, int, int, int]
"""Number, wire type, start, start of the content, end."""

VARINT, FIXED64, LEN, START_GROUP, END_GROUP, FIXED32 = range(6)

MAX_FIELDS = 256
"""The most fields of a message, with those of its tensors; the largest valid request has about a hundred."""
MAX_CHUNK_FIELDS = 16
"""The most fields of a message up to its chunk, and the most after it: chunks may be small, and there may be many."""
MAX_NBYTES = 64 * 1024
"""The most bytes of a message beside the elements of its tensors, or beside the one part of an exchange's message."""
MAX_TAG_NBYTES = 5
MAX_LENGTH_NBYTES = 5
"""As in protobuf 7; protobuf 6 takes ten. No valid length needs more than five."""

_MAX_DEPTH = 100
"""Protobuf's limit for nested groups."""
_MAX_FIELD_NUMBER = 2**29 - 1
_MAX_VARINT = 2**64 - 1
"""Higher bits of a tenth byte are ignored, as by protobuf."""


class TruncatedError(DecodeError):
    """Only the beginning of a message was given, and more is needed."""


class FieldReader:
    """Finds the fields of one message, at all levels together no more than ``max_fields``."""

    def __init__(self, data: Buffer, max_fields: int = MAX_FIELDS) -> None:
        """Reads a message, or its beginning."""
        self._data = data
        self._max_fields = self._fields_left = max_fields
        self._nbytes_left = MAX_NBYTES

    def fields(self, position: int, end: int) -> Iterator[Field]:
        """Yields the fields of the message between two offsets.

        Raises:
            DecodeError: They are malformed, or too many.
        """
        while position < end:
            begin = position
            number, wire_type, position = self._tag(position, end)
            start, position = self._content(number, wire_type, position, end)
            yield number, wire_type, begin, start, position

    def take(self, begin: int, end: int) -> bytes:
        """Returns bytes of the message.

        Raises:
            DecodeError: They, and those taken before, are more than `MAX_NBYTES`.
        """
        self.skip(begin, end)
        return bytes(self._data[begin:end])

    def skip(self, begin: int, end: int) -> None:
        """Counts bytes as taken; see `take`."""
        self._nbytes_left -= end - begin
        if self._nbytes_left < 0:
            raise DecodeError(f"a message must have at most {MAX_NBYTES} bytes beside the elements of its tensors")

    def _tag(self, position: int, end: int) -> tuple[int, int, int]:
        if not self._fields_left:
            raise DecodeError(f"a message must have at most {self._max_fields} fields, with those of its tensors")
        self._fields_left -= 1
        tag, position = read_varint(self._data, position, end, MAX_TAG_NBYTES)
        number = tag >> 3
        if not 0 < number <= _MAX_FIELD_NUMBER:
            raise DecodeError(f"there is no field number {number}")
        return number, tag & 7, position

    def _content(self, number: int, wire_type: int, position: int, end: int, depth: int = 0) -> tuple[int, int]:
        """Returns start and end of the content of a field whose tag ends at ``position``."""
        start = position
        if wire_type == VARINT:
            _, position = read_varint(self._data, position, end, 10)
        elif wire_type == LEN:
            nbytes, start = read_varint(self._data, position, end, MAX_LENGTH_NBYTES)
            position = start + nbytes
        elif wire_type == FIXED64:
            position += 8
        elif wire_type == FIXED32:
            position += 4
        elif wire_type == START_GROUP:
            position = self._group_end(number, position, end, depth + 1)
        else:
            raise DecodeError(f"field {number} has wire type {wire_type} at byte {start}")
        if position > end:
            raise DecodeError(
                f"field {number} ends at byte {position}, after the message that holds it, which ends at {end}"
            )
        return start, position

    def _group_end(self, group: int, position: int, end: int, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise DecodeError(f"groups are nested more than {_MAX_DEPTH} deep")
        while True:
            number, wire_type, position = self._tag(position, end)
            if wire_type == END_GROUP:
                if number != group:
                    raise DecodeError(f"group {group} is ended as group {number}")
                return position
            _, position = self._content(number, wire_type, position, end, depth)


def read_varint(data: bytes | bytearray | memoryview, position: int, end: int, max_nbytes: int) -> tuple[int, int]:
    """Returns the varint at an offset, and where it ends.

    Raises:
        TruncatedError: It does not end within the data, of which there is more.
        DecodeError: It does not end within ``max_nbytes``, or before ``end``.
    """
    value = shift = 0
    at = position
    limit = position + max_nbytes
    for byte in data[position : limit if limit < end else end]:
        at += 1
        if byte < 0x80:
            return (value | byte << shift) & _MAX_VARINT, at
        value |= (byte & 0x7F) << shift
        shift += 7
    if at - position == max_nbytes:
        raise DecodeError(f"the varint at byte {position} has more than {max_nbytes} bytes")
    if at == len(data) < end or position > len(data):
        raise TruncatedError("the message goes on")
    raise DecodeError(f"the varint at byte {position} has no end")
