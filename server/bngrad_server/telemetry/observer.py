"""Observes how requests end: counts and traces them, and logs and keeps the failed ones."""

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
from bngrad_server.telemetry.metrics import Metrics, Outcome

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
    """A request that failed.

    Attributes:
        time: When it failed, in seconds since 1970.
        code: The name of its status code.
        op: Its op.
        transport: Its transport.
        client: Its client, see `bngrad_server.rpc_context.RpcContext`.
        request_id: Its id, see `request_id_of`.
        message: The reason.
    """

    time: float
    code: str
    op: str
    transport: str
    client: str
    request_id: str
    message: str


class Observer:
    """Observes the requests since the start; any thread may use it.

    Attributes:
        metrics: Counts requests.
        tracing: Makes spans of requests; None without tracing.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self.metrics = Metrics(tuple(op.name for op in OPS))
        self._sampler = Sampler()
        self._recent: deque[Failure] = deque(maxlen=_RECENT)
        self._mutex = threading.Lock()

    @property
    def failures_left_out(self) -> int:
        """The number of failures not logged, since there were too many at once."""
        return self._sampler.left_out

    def recent_failures(self) -> list[dict[str, Any]]:
        """Returns the last failures, the latest first, ready for JSON."""
        with self._mutex:
            return [asdict(failure) for failure in reversed(self._recent)]

    def failed(self, op: str, transport: str, context: RpcContext, error: BaseException, received_at: float) -> None:
        """Records a request that failed; of many failures at once, only some are logged and kept."""
        code = code_of(error)
        self.metrics.failed(op, transport, code.name)
        if self.tracing is not None:
            self.tracing.failed(Outcome(op, transport, code, received_at), context, f"{error}"[:_MAX_MESSAGE])
        left_out = self._sampler.admit(code.name)
        if left_out is None:
            return
        message = f"{error}"[:_MAX_MESSAGE] or type(error).__name__
        failure = Failure(time.time(), code.name, op, transport, context.client, request_id_of(context), message)
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


def request_id_of(context: RpcContext) -> str:
    """Returns the ``x-request-id`` of the client's metadata; a random id without a usable one."""
    given = context.metadata.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
