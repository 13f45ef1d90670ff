"""Reads and writes messages that hold tensors, without copying the elements.

The generated classes copy every element at least once, so they handle everything except the elements. The bytes on the
wire are exactly protobuf's: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.fields import LEN, MAX_LENGTH_NBYTES, Buffer, FieldReader, TruncatedError, read_varint

AnyMessage = TypeVar("AnyMessage", bound=Message)
Meaning = TypeVar("Meaning")

_Skeleton: TypeAlias = tuple[tuple[int, int, bytes], ...]
"""The pieces between the elements of a message: start, end and bytes of each."""

_DATA_FIELD = pb.Tensor.DESCRIPTOR.fields_by_name["data"].number
PREFIX_NBYTES = 1 + MAX_LENGTH_NBYTES
"""How much of a message `only_field` needs, in bytes."""
_MAX_CACHED_NBYTES = 1024
"""How many bytes beside its elements a message may have whose layout is cached."""
_MAX_LAYOUTS = 2048
"""How many layouts a decoder caches before it begins anew; each array in shared memory makes one."""
_MAX_WITH_BEGINNING = 32
"""How many of them may have the same beginning."""
_MAX_BEGINNINGS = 8
"""How many lengths the beginnings of messages of one length may have."""


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

    Messages that differ in their elements alone have the same meaning, so meanings are cached. The bounds of
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
        self._ends: dict[int, tuple[int, ...]] = {}  # where the elements begin, by the length of the message
        self._layouts: dict[tuple[int, bytes], tuple[tuple[_Skeleton, Meaning], ...]] = {}  # by length and beginning
        self._count = 0  # of layouts cached since it was last empty
        self._mutex = threading.Lock()

    def decode(self, data: Buffer) -> Meaning:
        """Returns what a message means.

        Raises:
            DecodeError: Protobuf 7 would reject the message as malformed, or it exceeds the bounds.
        """
        meaning = self.known(data)
        return self._read(data) if meaning is None else meaning

    def known(self, data: Buffer) -> Meaning | None:
        """Returns what a message means if that is cached, at next to no cost."""
        nbytes = len(data)
        for elements in self._ends.get(nbytes, ()):
            for skeleton, meaning in self._layouts.get((nbytes, bytes(data[:elements])), ()):
                for start, end, piece in skeleton:
                    if data[start:end] != piece:
                        break
                else:
                    return meaning
        return None

    def check_beginning(self, beginning: Buffer, nbytes: int) -> None:
        """Checks the first bytes of a message of ``nbytes``, so that the rest of a bad one need not be received.

        Raises:
            DecodeError: Whatever follows, the message is malformed, or exceeds the bounds.
        """
        with suppress(TruncatedError):
            self._split(beginning, nbytes)

    def _read(self, data: Buffer) -> Meaning:
        layout, skeleton = self._parse(data)
        meaning = self._interpret(layout)
        if sum(len(piece) for _, _, piece in skeleton) <= _MAX_CACHED_NBYTES:
            self._add(len(data), skeleton, meaning)
        return meaning

    def _add(self, nbytes: int, skeleton: _Skeleton, meaning: Meaning) -> None:
        (_, elements, beginning), *rest = skeleton
        with self._mutex:
            if self._count >= _MAX_LAYOUTS:
                self._ends, self._layouts, self._count = {}, {}, 0
            self._count += 1
            ends = self._ends.get(nbytes, ())
            if elements not in ends:
                self._ends[nbytes] = (elements, *ends[: _MAX_BEGINNINGS - 1])
            known = self._layouts.get((nbytes, beginning), ())
            self._layouts[nbytes, beginning] = ((tuple(rest), meaning), *known[: _MAX_WITH_BEGINNING - 1])

    def _parse(self, data: Buffer) -> tuple[Layout[AnyMessage], _Skeleton]:
        """Splits off the elements, and parses the rest with protobuf, which merges fields that come twice."""
        pieces, elements, skeleton = self._split(data, len(data))
        message = self._type.FromString(b"".join(pieces))
        tensors = {
            name: TensorSpan(getattr(message, name), start, end - start) for name, (start, end) in elements.items()
        }
        return Layout(message, tensors), skeleton

    def _split(self, data: Buffer, nbytes: int) -> tuple[list[bytes], dict[str, tuple[int, int]], _Skeleton]:
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
                    skeleton.append((seen, inner_start, bytes(data[seen:inner_start])))
                    seen = inner_end
                else:
                    header.append(reader.take(inner_begin, inner_end))
            pieces += (field_prefix(number, sum(map(len, header))), *header)
        skeleton.append((seen, nbytes, bytes(data[seen:])))
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
        length, start = read_varint(data, 1, len(data), MAX_LENGTH_NBYTES)
    except DecodeError:
        return None
    return (data[0] >> 3, start) if start + length == nbytes else None


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
