"""Sees how requests end: has them counted and traced, and says of those that failed why, in the log and later."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import grpc

from bngrad_server.codec.ops import OPS
from bngrad_server.errors import code_of
from bngrad_server.rpc_context import RpcContext
from bngrad_server.telemetry.logs import Sampler
from bngrad_server.telemetry.metrics import Ended, Metrics

if TYPE_CHECKING:
    from bngrad_server.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_LEVELS = {
    grpc.StatusCode.CANCELLED: logging.DEBUG,
    grpc.StatusCode.INVALID_ARGUMENT: logging.INFO,
    grpc.StatusCode.INTERNAL: logging.ERROR,
}
_RECENT = 50
_MAX_MESSAGE = 300
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was not answered.

    Attributes:
        time: When, in seconds since 1970.
        code: The name of its status code.
        op: What it asked for.
        transport: How it came.
        client: Who asked, see `bngrad_server.rpc_context.RpcContext`.
        request_id: What the client calls it, or a name that was made up.
        message: Why.
    """

    time: float
    code: str
    op: str
    transport: str
    client: str
    request_id: str
    message: str


class Observer:
    """What is known of the requests since the start; for any thread.

    Attributes:
        metrics: Their numbers.
        tracing: Makes their spans; None where nobody wants them.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self.metrics = Metrics(tuple(op.name for op in OPS))
        self._sampler = Sampler()
        self._recent: deque[Failure] = deque(maxlen=_RECENT)
        self._mutex = threading.Lock()

    @property
    def failures_left_out(self) -> int:
        """How many failures were not logged, since there were too many at once."""
        return self._sampler.left_out

    def recent_failures(self) -> list[dict[str, Any]]:
        """The last failures, the latest first, as JSON takes them."""
        with self._mutex:
            return [asdict(failure) for failure in reversed(self._recent)]

    def failed(self, op: str, transport: str, caller: RpcContext, error: BaseException, received_at: float) -> None:
        """Notes a request that was not; of many at once only some are looked at more closely."""
        code = code_of(error)
        self.metrics.failed(op, transport, code.name)
        if self.tracing is not None:
            self.tracing.failed(Ended(op, transport, code, received_at), caller, f"{error}"[:_MAX_MESSAGE])
        left_out = self._sampler.admit(code.name)
        if left_out is None:
            return
        message = f"{error}"[:_MAX_MESSAGE] or type(error).__name__
        failure = Failure(time.time(), code.name, op, transport, caller.client, request_id_of(caller), message)
        if code is not grpc.StatusCode.CANCELLED:
            with self._mutex:
                self._recent.append(failure)
        level = _LEVELS.get(code, logging.WARNING)
        if logger.isEnabledFor(level):
            fields = asdict(failure)
            del fields["time"], fields["message"]
            if left_out:
                fields["left_out"] = left_out
            logger.log(level, "a request was not answered: %s", message, extra={"fields": fields})


def request_id_of(caller: RpcContext) -> str:
    """What the client calls its request, by ``x-request-id``; a name that was made up where it says nothing usable."""
    given = caller.metadata.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
