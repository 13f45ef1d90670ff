"""The wire format of frames (RFC 9113, sections 4 and 6), and the search for all DATA of a stream at once."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from bngrad_wire.fields import Buffer
from bngrad_wire.http2.errors import ErrorCode

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_NBYTES = 9

DATA = 0
HEADERS = 1
PRIORITY = 2
RST_STREAM = 3
SETTINGS = 4
PUSH_PROMISE = 5
PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
CONTINUATION = 9

ACK = 0x1
END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

HEADER_TABLE_SIZE = 1
ENABLE_PUSH = 2
MAX_CONCURRENT_STREAMS = 3
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_SIZE = 5
MAX_HEADER_LIST_SIZE = 6

DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
MIN_FRAME_SIZE = 2**14
LARGEST_FRAME_SIZE = 2**24 - 1
MAX_STREAM_ID = 2**31 - 1

_MAX_DATA_FRAMES = 40

UINT32 = Struct(">I")
SETTING = Struct(">HI")
_HEADER = Struct(">BHBBI")
_pack = _HEADER.pack
_unpack_from = _HEADER.unpack_from


class WholeData(NamedTuple):
    """The content of all DATA frames of a stream, their number, and the offset of their end."""

    content: memoryview
    frame_count: int
    end: int


def frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Packs the nine bytes in front of a payload of ``length`` bytes."""
    return _pack(length >> 16, length & 0xFFFF, kind, flags, stream_id)


def parse_header(buffer: Buffer, offset: int) -> tuple[int, int, int, int]:
    """Returns length, type, flags and stream of the frame that starts at ``offset``."""
    high, low, kind, flags, stream_id = _unpack_from(buffer, offset)
    return high << 16 | low, kind, flags, stream_id & MAX_STREAM_ID


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Packs a whole frame."""
    return frame_header(len(payload), kind, flags, stream_id) + payload


def header_block(stream_id: int, block: bytes, flags: int) -> list[bytes]:
    """Packs a header block into HEADERS and, if it is long, CONTINUATION frames."""
    if len(block) <= MIN_FRAME_SIZE:
        return [frame(HEADERS, flags | END_HEADERS, stream_id, block)]
    packed = [frame(HEADERS, flags, stream_id, block[:MIN_FRAME_SIZE])]
    for start in range(MIN_FRAME_SIZE, len(block), MIN_FRAME_SIZE):
        last = END_HEADERS if start + MIN_FRAME_SIZE >= len(block) else 0
        packed.append(frame(CONTINUATION, last, stream_id, block[start : start + MIN_FRAME_SIZE]))
    return packed


def settings(values: dict[int, int]) -> bytes:
    """Packs a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*item) for item in values.items()))


def window_update(stream_id: int, increment: int) -> bytes:
    """Packs a WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, UINT32.pack(increment))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Packs a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, UINT32.pack(code))


def goaway(last_stream_id: int, code: ErrorCode, reason: str = "") -> bytes:
    """Packs a GOAWAY frame."""
    return frame(GOAWAY, 0, 0, UINT32.pack(last_stream_id) + UINT32.pack(code) + reason.encode())


def find_data(buffer: bytearray, low: int, high: int, stream_id: int, max_length: int) -> WholeData | int | None:
    """Finds all DATA of a stream in a buffer, which is cheaper than to handle it frame by frame.

    Args:
        buffer: The buffer.
        low: Where the DATA begins.
        high: Where the buffer's contents end.
        stream_id: The stream's number.
        max_length: The longest payload that a frame may have.

    Returns:
        The data if it is there to its end; else the offset up to which more must arrive before it can be; None if
        something else comes in between, or if it has very many frames, or one that is too long.
    """
    view = memoryview(buffer)
    contents: list[memoryview] = []
    position = low
    for _ in range(_MAX_DATA_FRAMES):
        start = position + HEADER_NBYTES
        if start > high:
            return start
        length, kind, flags, data_stream_id = parse_header(buffer, position)
        if kind != DATA or flags & ~END_STREAM or data_stream_id != stream_id or length > max_length:
            return None
        position = start + length
        if position > high:
            return position
        contents.append(view[start:position])
        if flags:
            return WholeData(memoryview(b"".join(contents)), len(contents), position)
    return None
