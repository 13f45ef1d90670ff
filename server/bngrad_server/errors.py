"""The server's own exceptions, and the one table from exceptions to gRPC status codes.

The table has the code by which a request is counted, and what makes the status that the client gets.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from bngrad_kernels.spec import InvalidArgumentError
from bngrad_wire import http2

logger = logging.getLogger(__name__)

_LONGEST_MESSAGE_NBYTES = 1024
_LONGEST_DESCRIPTION_NBYTES = 256
"""Messages may quote input of any length, but clients accept headers of 8 KiB, and drop the connection over 16."""

RETRY_DELAY_S = 1.0
"""After which a retry is worthwhile where nothing better is known."""

REFUSAL = "a valid token is needed"
"""The only text that a client without a token ever gets, whatever it called."""


class SettingError(Exception):
    """Settings have values that this host cannot use, such as files that cannot be read.

    Attributes:
        values: The values by the names of the settings.
        expected: What is expected of them.
    """

    def __init__(self, values: Mapping[str, object], expected: str) -> None:
        self.values = values
        self.expected = expected
        super().__init__(self.told({}))

    def told(self, origins: Mapping[str, str]) -> str:
        """Returns the message, with each setting named by its origin, such as a flag, where that is known."""
        given = " and ".join(f"{origins.get(name, name)} is {str(value)!r}" for name, value in self.values.items())
        return f"{given}; {self.expected}"


class ListenError(Exception):
    """An address cannot be listened on."""


class TracingError(Exception):
    """Spans cannot be exported."""


class WorkerStartError(Exception):
    """A worker process ended before it was ready, at its first start."""


class WorkerDiedError(Exception):
    """A worker process ended.

    Attributes:
        saw_batch: Whether the batch may be the cause. A worker that never read it was dead or hung before.
    """

    def __init__(self, reason: str, *, saw_batch: bool = True) -> None:
        super().__init__(reason)
        self.saw_batch = saw_batch


class UnauthenticatedError(Exception):
    """The call has no valid token. The message is the same for every such call."""

    def __init__(self) -> None:
        super().__init__(REFUSAL)


class OverloadedError(Exception):
    """The server has no room for another request.

    Attributes:
        retry_delay_s: Seconds after which a retry is worthwhile.
    """

    def __init__(self, message: str, retry_delay_s: float = RETRY_DELAY_S) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class ArenaTooSmallError(Exception):
    """A request needs more than the whole arena."""


class RequestTooLargeError(Exception):
    """A request has more bytes than its client may have in the server."""


class MessageTooLargeError(Exception):
    """A message exceeds the limit of its transport."""


class UnknownTicketError(Exception):
    """A request names a tensor, sent ahead, that the server does not have, or no longer; sent whole, it is served."""


class RegionsFullError(Exception):
    """A lease would exceed the memory that may be shared, or the number of regions."""


class ComputeError(Exception):
    """A request could not be computed, and its content is not the cause."""


_Told = tuple[grpc.StatusCode, status_pb2.Status]
_Tell = Callable[[grpc.StatusCode, Any], _Told]


def code_of(error: BaseException) -> grpc.StatusCode:
    """Gives the code by which metrics, logs and traces count a request that ended with an exception."""
    if isinstance(error, http2.RpcError) and error.code == grpc.StatusCode.UNIMPLEMENTED.value[0]:
        return grpc.StatusCode.UNIMPLEMENTED  # no reset by a client has this code
    code, _ = _row_of(error)
    return code


def grpc_status(error: Exception) -> _Told:
    """Gives the status that the client gets; logs an unexpected exception, whose text may not be meant for clients."""
    code, tell = _row_of(error)
    return tell(code, error)


def _row_of(error: BaseException) -> tuple[grpc.StatusCode, _Tell]:
    return next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)


def _tell_text(code: grpc.StatusCode, error: Exception) -> _Told:
    return _status(code, str(error))


def _tell_violations(code: grpc.StatusCode, error: InvalidArgumentError) -> _Told:
    _, status = told = _status(code, str(error))
    violations = [
        error_details_pb2.BadRequest.FieldViolation(field=violation.field, description=cut(violation.description))
        for violation in error.violations
    ]
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=violations))
    return told


def _tell_retry_delay(code: grpc.StatusCode, error: OverloadedError) -> _Told:
    return _with_retry_delay(code, str(error), error.retry_delay_s)


@functools.lru_cache(maxsize=1024)
def _with_retry_delay(code: grpc.StatusCode, message: str, retry_delay_s: float) -> _Told:
    """Cached, so that an overloaded server refuses at little cost."""
    _, status = told = _status(code, message)
    retry_info = error_details_pb2.RetryInfo()
    retry_info.retry_delay.FromNanoseconds(int(retry_delay_s * 1e9))
    status.details.add().Pack(retry_info)
    return told


def _tell_no_memory(code: grpc.StatusCode, error: Exception) -> _Told:
    logger.error("a call found no memory", exc_info=error)
    return _with_retry_delay(code, "the server has no memory left for this call", RETRY_DELAY_S)


def _tell_stopping(code: grpc.StatusCode, error: Exception) -> _Told:
    return _status(grpc.StatusCode.UNAVAILABLE, "the server is stopping")


def _tell_failure(code: grpc.StatusCode, error: Exception) -> _Told:
    logger.error("a call failed", exc_info=error)
    return _status(grpc.StatusCode.INTERNAL, "the server failed; its log says why")


# The class nearest to the exception's own counts.
_TABLE: dict[type[BaseException], tuple[grpc.StatusCode, _Tell]] = {
    InvalidArgumentError: (grpc.StatusCode.INVALID_ARGUMENT, _tell_violations),
    DecodeError: (grpc.StatusCode.INVALID_ARGUMENT, _tell_text),
    OverloadedError: (grpc.StatusCode.RESOURCE_EXHAUSTED, _tell_retry_delay),
    ArenaTooSmallError: (grpc.StatusCode.RESOURCE_EXHAUSTED, _tell_text),
    RequestTooLargeError: (grpc.StatusCode.RESOURCE_EXHAUSTED, _tell_text),
    MessageTooLargeError: (grpc.StatusCode.RESOURCE_EXHAUSTED, _tell_text),
    UnknownTicketError: (grpc.StatusCode.FAILED_PRECONDITION, _tell_text),
    MemoryError: (grpc.StatusCode.RESOURCE_EXHAUSTED, _tell_no_memory),
    TimeoutError: (grpc.StatusCode.DEADLINE_EXCEEDED, _tell_text),
    UnauthenticatedError: (grpc.StatusCode.UNAUTHENTICATED, _tell_text),
    ComputeError: (grpc.StatusCode.INTERNAL, _tell_text),
    CancelledError: (grpc.StatusCode.CANCELLED, _tell_stopping),  # if a client is still there, the server stops
    ConnectionError: (grpc.StatusCode.CANCELLED, _tell_failure),
    GeneratorExit: (grpc.StatusCode.CANCELLED, _tell_failure),
    http2.RpcError: (grpc.StatusCode.CANCELLED, _tell_failure),
    BaseException: (grpc.StatusCode.INTERNAL, _tell_failure),
}


def _status(code: grpc.StatusCode, message: str) -> _Told:
    return code, status_pb2.Status(code=code.value[0], message=cut(message, _LONGEST_MESSAGE_NBYTES))


def cut(text: str, nbytes: int = _LONGEST_DESCRIPTION_NBYTES) -> str:
    """Cuts a text to a number of bytes of UTF-8, and marks the cut."""
    encoded = text.encode()
    return text if len(encoded) <= nbytes else f"{encoded[:nbytes].decode(errors='ignore')}..."
