"""Encodes header blocks (RFC 7541), and the header values of gRPC (PROTOCOL-HTTP2.md)."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable
from urllib.parse import quote, unquote

from hpack.hpack import encode_integer

from bngrad_wire.http2.errors import RpcError, Status, error_of_http

CONTENT_TYPE = "application/grpc"

_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_LARGEST_TIMEOUT = 99_999_999
_QUOTED_LENGTH = 20
"""The most characters of a malformed value that an error quotes."""
_UNESCAPED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
"""The characters that grpc-message does not percent-encode: printable ASCII except "%"."""


def encode(headers: Iterable[tuple[str, str]]) -> bytes:
    """Encodes headers as literals without indexing, so that the block means the same on every connection."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers)


def _string(text: str) -> bytes:
    data = text.encode()
    return bytes(encode_integer(len(data), 7)) + data


def status_headers(code: int, message: str, details: bytes) -> list[tuple[str, str]]:
    """Returns the trailers that carry a status."""
    headers = [("grpc-status", str(int(code)))]
    if message:
        headers.append(("grpc-message", quote(message, safe=_UNESCAPED)))
    if details:
        headers.append(("grpc-status-details-bin", encode_binary(details)))
    return headers


def encode_binary(value: bytes) -> str:
    """Returns how the value of a binary header, whose name ends in ``-bin``, is written."""
    return b64encode(value).decode().rstrip("=")


def parse_status(headers: dict[str, str]) -> RpcError | None:
    """Returns the error that trailers carry; None for OK."""
    code = headers.get("grpc-status")
    if code == "0":
        return None
    if code is None:
        http = headers.get(":status", "200")
        return RpcError(Status.UNKNOWN, "trailers without grpc-status") if http == "200" else error_of_http(http)
    known = int(code) if re.fullmatch("[0-9]{1,3}", code) else Status.UNKNOWN
    details = headers.get("grpc-status-details-bin", "")
    try:
        decoded = b64decode(details + "=" * (-len(details) % 4))
    except (Base64Error, ValueError):
        decoded = b""
    return RpcError(known or Status.UNKNOWN, unquote(headers.get("grpc-message", "")), decoded)


def format_timeout(seconds: float) -> str:
    """Returns the value of ``grpc-timeout``, rounded down but never to zero."""
    for unit in "num":
        amount = int(seconds / _SECONDS[unit])
        if amount <= _LARGEST_TIMEOUT:
            return f"{max(amount, 1)}{unit}"
    return f"{min(int(seconds), _LARGEST_TIMEOUT)}S"


def parse_timeout(text: str) -> float:
    """Returns the seconds of a ``grpc-timeout`` value.

    Raises:
        ValueError: It is not one to eight digits and a unit.
    """
    match = _TIMEOUT.fullmatch(text)
    if match is None:
        raise ValueError(f"malformed grpc-timeout {text[:_QUOTED_LENGTH]!r}")
    return int(match[1]) * _SECONDS[match[2]]
