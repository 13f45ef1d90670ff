"""What the headers and trailers of a request say, and whether they are well-formed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from bngrad_wire.http2 import header_block
from bngrad_wire.http2.block_decoder import HeaderBlock
from bngrad_wire.http2.connection_state import ConnectionState
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.stream import Stream

_GRPC = re.compile(re.escape(header_block.CONTENT_TYPE) + "([+;].*)?")
"""A content-type of gRPC; that of gRPC-Web, another protocol, begins with the same words."""
_CONTENT_LENGTH = re.compile("[0-9]{1,18}")


class CallHeaders(NamedTuple):
    """What the headers of a call say; see `ServerCall`. With a fault, they are malformed."""

    path: str
    timeout_s: float | None
    metadata: Mapping[str, str]
    fault: str = ""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> CallHeaders:
        """Reads the headers that gRPC defines."""
        timeout_s, fault = None, ""
        if (timeout := headers.get("grpc-timeout")) is not None:
            try:
                timeout_s = header_block.parse_timeout(timeout)
            except ValueError as error:
                fault = str(error)
        metadata = {name: value for name, value in headers.items() if not name.startswith(":")}
        return cls(headers.get(":path", ""), timeout_s, metadata, fault)


def is_grpc(headers: Mapping[str, str]) -> bool:
    """Returns whether the headers begin a call of gRPC."""
    return headers[":method"] == "POST" and _GRPC.fullmatch(headers.get("content-type", "")) is not None


def has_valid_length(headers: Mapping[str, str], end: bool) -> bool:
    """Returns whether the content-length, if there is one, is a number, and zero if nothing follows."""
    length = headers.get("content-length", "0")
    return length == "0" or (_CONTENT_LENGTH.fullmatch(length) is not None and not (end and int(length)))


def content_length(headers: Mapping[str, str]) -> int | None:
    """Returns the content-length, if there is one; `has_valid_length` has checked it."""
    length = headers.get("content-length")
    return None if length is None else int(length)


def check_trailers(connection: ConnectionState, stream: Stream, block: HeaderBlock, end: bool) -> None:
    """Resets the stream if its trailers are malformed.

    Raises:
        ProtocolError: They do not end the stream.
    """
    if not end:
        connection.connection_error(ErrorCode.PROTOCOL_ERROR, f"a second header block on stream {stream.id}")
    if block.fault or block.has_pseudo_headers or stream.content_left:
        connection.stream_error(stream, ErrorCode.PROTOCOL_ERROR, block.fault or "the trailers are malformed")
