"""Observes how requests end: counts and traces them, and logs and keeps the failed ones."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc

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
_MOST_PER_SECOND = 100
"""Failures to log and keep, of all clients."""
_MAX_MESSAGE = 300
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class Observer:
    """Observes the requests since the start; any thread may use it.

    Attributes:
        metrics: Counts requests.
        tracing: Makes spans of requests; None without tracing.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self.metrics = Metrics()
        self._sampler = Sampler(_MOST_PER_SECOND)
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._mutex = threading.Lock()

    @property
    def failures_left_out(self) -> int:
        """The number of failures not logged, since there were too many at once."""
        return self._sampler.left_out

    def recent_failures(self) -> list[dict[str, Any]]:
        """Returns the last failures, the latest first, ready for JSON; times are in seconds since 1970."""
        with self._mutex:
            return list(reversed(self._recent))

    def failed(self, op: str, transport: str, rpc: RpcContext, error: BaseException, received_at: float) -> None:
        """Records a request that failed; of many failures at once, only some are logged and kept."""
        code = code_of(error)
        self.metrics.failed(op, transport, code.name)
        if self.tracing is not None:
            self.tracing.failed(Outcome(op, transport, code, received_at), rpc, f"{error}"[:_MAX_MESSAGE])
        left_out = self._sampler.admit(f"{code.name} {rpc.client}")  # no client's failures hide those of others
        if left_out is None:
            return
        message = f"{error}"[:_MAX_MESSAGE] or type(error).__name__
        request = {"op": op, "transport": transport, "client": rpc.client, "request_id": request_id_of(rpc)}
        fields: dict[str, Any] = {"code": code.name, **request}
        if code is not grpc.StatusCode.CANCELLED:
            with self._mutex:
                self._recent.append({"time": time.time(), **fields, "message": message})
        level = _LEVELS.get(code, logging.WARNING)
        if logger.isEnabledFor(level):
            if left_out:
                fields["left_out"] = left_out
            logger.log(level, "a request was not answered: %s", message, extra={"fields": fields})


def request_id_of(rpc: RpcContext) -> str:
    """Returns the ``x-request-id`` of the client's metadata; a random id without a usable one."""
    given = rpc.metadata.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
