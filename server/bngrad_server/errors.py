"""What a client is told when a request cannot be answered."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import CancelledError

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from bngrad_kernels.spec import InvalidArgumentError
from bngrad_wire import http2

logger = logging.getLogger(__name__)


_LONGEST_MESSAGE_NBYTES = 1024
_LONGEST_DESCRIPTION_NBYTES = 256
"""What has arrived may be quoted, of any length; but clients take headers of 8 KiB, and lose the connection over 16."""


REFUSAL = "a valid token is needed"
"""All that is ever said to somebody without one, whatever they asked for."""


class ListenError(Exception):
    """An address cannot be listened on."""


class TracingError(Exception):
    """Spans cannot be exported."""


class WorkerStartError(Exception):
    """A worker ended before it was ready, the first time it was started."""


class WorkerDiedError(Exception):
    """The worker's process ended.

    Attributes:
        saw_batch: Whether it may have died of the batch. One that never read it was dead already, or hung.
    """

    def __init__(self, reason: str, *, saw_batch: bool = True) -> None:
        super().__init__(reason)
        self.saw_batch = saw_batch


class UnauthenticatedError(Exception):
    """The caller has not said who it is; the message is for everybody."""

    def __init__(self) -> None:
        super().__init__(REFUSAL)


class OverloadedError(Exception):
    """The server has more to do than it can do soon.

    Attributes:
        retry_delay_s: When it is worth asking again, in seconds from now.
    """

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class ArenaTooSmallError(Exception):
    """A request needs more than the whole arena."""


class MessageTooLargeError(Exception):
    """A message is larger than one may be where it came."""


class RegionsFullError(Exception):
    """A lease would take more than the memory that may be shared, or there are too many."""


class ComputeError(Exception):
    """A request could not be computed, through no fault of its own."""


_CODES: list[tuple[type[Exception], grpc.StatusCode]] = [
    (InvalidArgumentError, grpc.StatusCode.INVALID_ARGUMENT),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),
    (MessageTooLargeError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ArenaTooSmallError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ComputeError, grpc.StatusCode.INTERNAL),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
]


def code_of(error: BaseException) -> grpc.StatusCode:
    """How the end of a request is counted; one whose client has gone is CANCELLED."""
    if isinstance(error, http2.RpcError) and error.code == grpc.StatusCode.UNIMPLEMENTED.value[0]:
        return grpc.StatusCode.UNIMPLEMENTED  # a compressed message, which no client's reset can be taken for
    if isinstance(error, (CancelledError, ConnectionError, GeneratorExit, http2.RpcError)):
        return grpc.StatusCode.CANCELLED
    if isinstance(error, OverloadedError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return next((code for cls, code in _CODES if isinstance(error, cls)), grpc.StatusCode.INTERNAL)


def grpc_status(error: Exception) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """The status that an exception of the engine stands for.

    The text of an unexpected exception stays in the log: it may tell what is no client's business.
    """
    if isinstance(error, CancelledError):
        return _status(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
    if isinstance(error, OverloadedError):
        return _overloaded(str(error), error.retry_delay_s)
    for cls, code in _CODES:
        if isinstance(error, cls):
            return _status(code, str(error), error)
    logger.error("a call failed", exc_info=error)
    return _status(grpc.StatusCode.INTERNAL, "the server failed; its log says why")


@functools.lru_cache(maxsize=1024)
def _overloaded(message: str, retry_delay_s: float) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """Kept, so that refusing costs little when there is so much to refuse."""
    code, status = _status(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
    retry_info = error_details_pb2.RetryInfo()
    retry_info.retry_delay.FromNanoseconds(int(retry_delay_s * 1e9))
    status.details.add().Pack(retry_info)
    return code, status


def _status(
    code: grpc.StatusCode, message: str, error: Exception | None = None
) -> tuple[grpc.StatusCode, status_pb2.Status]:
    status = status_pb2.Status(code=code.value[0], message=_cut(message, _LONGEST_MESSAGE_NBYTES))
    if isinstance(error, InvalidArgumentError):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=violation.field, description=_cut(violation.description, _LONGEST_DESCRIPTION_NBYTES)
            )
            for violation in error.violations
        ]
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=violations))
    return code, status


def _cut(text: str, nbytes: int) -> str:
    """The text, of which the end is left out where it has more bytes."""
    encoded = text.encode()
    return text if len(encoded) <= nbytes else f"{encoded[:nbytes].decode(errors='ignore')}..."
