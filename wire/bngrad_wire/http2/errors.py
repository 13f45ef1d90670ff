"""Errors of connections and calls, and the error codes of HTTP/2."""

from __future__ import annotations

from enum import IntEnum


class ProtocolError(ConnectionError):
    """The peer broke HTTP/2 or gRPC framing; the connection is unusable."""


class PeerGoneError(ConnectionError):
    """The connection was closed or reset by the peer, ended by GOAWAY, or closed here."""


class PeerLostError(PeerGoneError):
    """The peer's host does not answer: it has no power, or packets are dropped."""


class EndOfConnectionError(PeerGoneError):
    """The peer closed the connection between two frames."""


class RpcError(Exception):
    """A call ended with a status other than OK, or was reset.

    Attributes:
        code: gRPC's status code, not zero.
        message: What the peer says about it.
        details: The serialised ``google.rpc.Status`` of ``grpc-status-details-bin``, or empty.
    """

    def __init__(self, code: int, message: str, details: bytes = b"") -> None:
        super().__init__(f"status {code}: {message}")
        self.code = code
        self.message = message
        self.details = details

    def copy(self) -> RpcError:
        """Returns a copy, to be raised.

        The error that a call keeps is never raised itself: its traceback would refer to the frames that hold the call,
        and the cycle would live until garbage is collected.
        """
        return RpcError(self.code, self.message, self.details)


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Status(IntEnum):
    """The gRPC status codes that this package itself uses."""

    CANCELLED = 1
    UNKNOWN = 2
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


_STATUS_OF_RESET: dict[int, Status] = {
    ErrorCode.INTERNAL_ERROR: Status.UNAVAILABLE,  # so a proxy ends a call whose server it lost
    ErrorCode.REFUSED_STREAM: Status.UNAVAILABLE,
    ErrorCode.CANCEL: Status.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}

_STATUS_OF_HTTP = {
    "401": Status.UNAUTHENTICATED,
    "403": Status.PERMISSION_DENIED,
    "404": Status.UNIMPLEMENTED,
    "429": Status.UNAVAILABLE,
    "502": Status.UNAVAILABLE,
    "503": Status.UNAVAILABLE,
    "504": Status.UNAVAILABLE,
    "400": Status.INTERNAL,
}


def error_name(code: int) -> str:
    """Returns the name of an HTTP/2 error code, or its number where RFC 9113 has no name for it."""
    return ErrorCode(code).name if code in ErrorCode._value2member_map_ else f"error {code}"


def error_of_reset(code: int) -> RpcError:
    """Maps the code of RST_STREAM to a status (PROTOCOL-HTTP2.md, "Errors")."""
    return RpcError(_STATUS_OF_RESET.get(code, Status.INTERNAL), f"the peer reset the call with {error_name(code)}")


def error_of_http(status: str) -> RpcError:
    """Maps an HTTP status that came without a gRPC one (http-grpc-status-mapping.md)."""
    code = _STATUS_OF_HTTP.get(status, Status.UNKNOWN)
    return RpcError(code, f"the peer answered with HTTP status {status}, not gRPC")
