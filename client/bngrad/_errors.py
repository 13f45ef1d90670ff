"""The errors of the client.

BngradError
├── ClientClosedError          also a RuntimeError
├── DeadlineExceededError      also a TimeoutError
├── InternalError
├── InvalidArgumentError       also a ValueError
├── ResourceExhaustedError
├── UnauthenticatedError       also a PermissionError
├── UnavailableError           also a ConnectionError
│   └── NotSharedError
└── UnimplementedError         also a NotImplementedError

`UnknownTicketError` is for the client itself. An argument of the wrong Python type, such as a string for epsilon, is a
plain TypeError.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from bngrad_wire import __version__
from bngrad_wire.printable import printable

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_RESET = "RST_STREAM with error code 2"
"""How grpcio reports, as INTERNAL, that a proxy lost its server amid an answer."""
_CREDENTIALS_HINT = "; token= must be one that this server accepts: the token itself, or the pathlib.Path of its file"


class BngradError(Exception):
    """Base of every error that a call ends with; where gRPC reported it, its error is the ``__cause__``."""


class ClientClosedError(BngradError, RuntimeError):
    """The client was closed, before or during the call; or it was inherited from a parent process by a fork."""


class DeadlineExceededError(BngradError, TimeoutError):
    """No answer came within the timeout."""


class InternalError(BngradError):
    """The server failed, or its answer is malformed."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One thing wrong with a request.

    Attributes:
        field: The name of the argument.
        description: What it has and what it should have.
    """

    field: str
    description: str


class InvalidArgumentError(BngradError, ValueError):
    """The request breaks the op's contract; sending it again does not help.

    Attributes:
        violations: What is wrong with each argument, if the server or the client says so.
    """

    violations: tuple[FieldViolation, ...]

    def __init__(self, message: str, violations: Iterable[FieldViolation] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class ResourceExhaustedError(BngradError):
    """The request needs more than the server has, now or ever.

    Attributes:
        retry_delay_s: The seconds after which the server expects to have it; None if the request needs more than the
            server can ever have, such as more memory than its arena.
    """

    retry_delay_s: float | None

    def __init__(self, message: str, retry_delay_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class UnauthenticatedError(BngradError, PermissionError):
    """The server does not accept the client's token: it is missing, wrong or expired."""


class UnavailableError(BngradError, ConnectionError):
    """No server answers at the target, or the server is stopping. Every call may safely be sent again."""


class NotSharedError(UnavailableError):
    """The server shares no memory with this client, whose transport is "shared", or has leased all that it may have.

    Attributes:
        is_full: Whether it may have more once it, or others, have given some back: such calls are tried again for a
            second.
    """

    def __init__(self, message: str = "", *, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full


class UnknownTicketError(BngradError):
    """The server does not have a tensor that was sent ahead. The client sends it then, so no call ends with this."""


class UnimplementedError(BngradError, NotImplementedError):
    """The server at the target does not know the call: it is another service, or an older bngrad."""


_MESSAGE_TOO_LARGE = "Received message larger than max", "larger ones go by Exchange"
"""What servers say of a message that exceeds their limit: before and since they speak HTTP/2 themselves."""
_MESSAGE_HINT = "; leave out transport='unary', or give the server a larger --max-message-bytes"
_LOST = "Socket closed", "Connection reset", "TSI_DATA_CORRUPTED"
_LOST_HINT = " Both sides must use TLS, or neither; a server may also ask for a bngrad.Tls(certificate=..., key=...)."
_TLS_HINTS = {
    "WRONG_VERSION_NUMBER": "This client uses TLS, and what listens there does not.",
    "certificate has expired": "Its certificate has expired, or the clock here is wrong.",
    "certificate is not yet valid": "Its certificate is not yet valid, or the clock here is wrong.",
    "CERTIFICATE_VERIFY_FAILED": "bngrad.Tls(ca=...) should name the authority that has signed its certificate.",
    "Hostname Verification Check failed": "Its certificate is for other names; see bngrad.Tls(server_name=...).",
}
"""What to do about a handshake that failed, by a part of the message; the first that is found counts."""

_CLASSES: dict[grpc.StatusCode, type[BngradError]] = {
    grpc.StatusCode.CANCELLED: UnavailableError,  # A stopping server gives calls up.
    grpc.StatusCode.DATA_LOSS: InternalError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.FAILED_PRECONDITION: UnknownTicketError,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.UNKNOWN: InternalError,
}


def invalid_argument(*violations: FieldViolation) -> InvalidArgumentError:
    """Makes the error for violations that the client found itself."""
    return InvalidArgumentError("; ".join(violation.description for violation in violations), violations)


def is_encodable(text: str) -> bool:
    """Returns whether UTF-8 can encode the text: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_rpc_error(error: grpc.RpcError, target: str, timeout: float | None) -> BngradError:
    """Converts the error that a call of a gRPC channel raised; see `from_status`."""
    # Channels raise errors that are also a grpc.Call, which their type does not say.
    assert isinstance(error, grpc.Call)
    payloads = [value for key, value in error.trailing_metadata() or () if key == _STATUS_DETAILS_KEY]
    code, message = error.code(), error.details() or "no details"
    if _RESET in message:
        code = grpc.StatusCode.UNAVAILABLE
    return from_status(code, message, b"".join(payloads), target, timeout)


def from_status(code: grpc.StatusCode, message: str, details: bytes, target: str, timeout: float | None) -> BngradError:
    """Converts a status into an error of the client; the same for every transport.

    Args:
        code: The status.
        message: The message of the status.
        details: The serialised ``google.rpc.Status``; empty for none.
        target: The address that was called.
        timeout: The timeout of the call in seconds; None for no limit.
    """
    cls = _CLASSES.get(code, BngradError)
    if cls is InvalidArgumentError:
        violations = _detail(details, error_details_pb2.BadRequest).field_violations
        return InvalidArgumentError(message, [FieldViolation(each.field, each.description) for each in violations])
    if cls is ResourceExhaustedError:
        is_too_large = any(sign in message for sign in _MESSAGE_TOO_LARGE) and not message.startswith("CLIENT")
        hint = _MESSAGE_HINT if is_too_large else ""
        return ResourceExhaustedError(f"{target} answered {code.name}: {message}{hint}", _retry_delay_s(details))
    if cls is UnavailableError:
        reason = printable(message.partition("\n")[0]).rstrip(".")  # after a line grpcio may write what is no text
        return UnavailableError(f"{target} is not available: {reason}. {_what_to_check(message)}")
    if cls is DeadlineExceededError:
        return DeadlineExceededError(f"{target} did not answer within the timeout of {timeout} s: {message}")
    if cls is UnimplementedError:
        return UnimplementedError(f"{target} does not know this call of bngrad {__version__}: {message}")
    hint = _CREDENTIALS_HINT if cls is UnauthenticatedError else ""
    return cls(f"{target} answered {code.name}: {message}{hint}")


def _what_to_check(message: str) -> str:
    """Returns what to do about a server that is not available; TLS on one side alone looks like a lost connection."""
    for sign, hint in _TLS_HINTS.items():
        if sign in message:
            return hint
    if os.strerror(errno.EMFILE) in message:
        return "This process has no file descriptor left: see ulimit -n."
    is_lost = any(sign in message for sign in _LOST)
    return "Is `bngrad serve` running there?" + (_LOST_HINT if is_lost else "")


def _retry_delay_s(details: bytes) -> float | None:
    """Returns the server's hint in the details of a status."""
    info = _detail(details, error_details_pb2.RetryInfo)
    if not info.HasField("retry_delay"):
        return None
    return float(max(info.retry_delay.seconds + info.retry_delay.nanos / 1e9, 0.0))


def _detail(details: bytes, kind: Callable[[], Any]) -> Any:
    """Returns the message of a kind in the details of a status; an empty one if there is none."""
    status, found = status_pb2.Status(), kind()
    try:
        status.MergeFromString(details)
        for detail in status.details:
            detail.Unpack(found)
    except DecodeError:
        return kind()
    return found
