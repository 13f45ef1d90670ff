"""Messages that take far more to parse, byte by byte or field by field, than a good one of their size."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIZES = (2**9, 2**16, 2**22)

_MAX_S = 0.1
_MAX_NBYTES = 2**20
_VARINT_BITS = 7


def varint(value: int) -> bytes:
    out = bytearray()
    while value >> _VARINT_BITS:
        out.append(value & 0x7F | 0x80)
        value >>= _VARINT_BITS
    return bytes([*out, value])


def sized(number: int, content: bytes) -> bytes:
    """Returns a length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def _in_tensor(content: Callable[[int], bytes]) -> Callable[[int], bytes]:
    return lambda nbytes: sized(1, content(nbytes - 8))


def _in_location(content: Callable[[int], bytes]) -> Callable[[int], bytes]:
    return _in_tensor(lambda nbytes: sized(4, content(nbytes - 8)))


def repeated(field: bytes) -> Callable[[int], bytes]:
    return lambda nbytes: field * (nbytes // len(field))


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "unknown varints": repeated(b"\x78\x01"),
    "unknown empty bytes": repeated(b"\x7a\x00"),
    "unknown fixed32": repeated(b"\x7d1234"),
    "a long unknown field": lambda nbytes: sized(15, bytes(nbytes - 8)),
    "nested groups": repeated(b"\x7b" * 99 + b"\x7c" * 99),
    "a long group": lambda nbytes: b"\x7b" + repeated(b"\x78\x01")(nbytes - 2) + b"\x7c",
    "a group without end": lambda nbytes: b"\x7b" + repeated(b"\x78\x01")(nbytes - 1),
    "a group of bytes": lambda nbytes: b"\x7b" + sized(15, bytes(nbytes - 8)) + b"\x7c",
    "empty tensors": repeated(b"\x0a\x00"),
    "tensors in parts": repeated(b"\x0a\x02\x08\x03"),
    "a packed shape": _in_tensor(lambda nbytes: sized(2, repeated(b"\x01")(nbytes - 8))),
    "a shape": _in_tensor(repeated(b"\x10\x01")),
    "empty elements": _in_tensor(repeated(b"\x1a\x00")),
    "elements of a byte": _in_tensor(repeated(b"\x1a\x01x")),
    "dtypes": _in_tensor(repeated(b"\x08\x03")),
    "unknown fields in a tensor": _in_tensor(repeated(b"\x78\x01")),
    "locations": _in_tensor(repeated(b"\x22\x00")),
    "unknown fields in a location": _in_location(repeated(b"\x78\x01")),
    "a long key": _in_location(lambda nbytes: sized(1, bytes(nbytes - 8))),
    "a long data_format": lambda nbytes: sized(8, b"N" * (nbytes - 8)),
    "attributes": repeated(b"\x3d\0\0\0\0"),
}
"""By name, what makes a message of about that many bytes: field numbers are those of FusedBatchNormGradV3."""


@contextmanager
def at_little_cost(copied_nbytes: int = 0) -> Iterator[None]:
    """Checks that a block takes next to no time, nor memory beside its copies; it should take a tenth of the bounds."""
    gc.disable()  # what other tests have left would be collected in this time
    tracemalloc.start()
    began = time.thread_time()
    try:
        yield
    finally:
        seconds = time.thread_time() - began
        gc.enable()
        _, most_nbytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert seconds < _MAX_S
    assert most_nbytes < copied_nbytes + _MAX_NBYTES
