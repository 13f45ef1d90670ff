"""The health service (gRPC's health checking protocol)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2 as pb

from bngrad_server.errors import cut
from bngrad_wire.http2 import RpcError


class Health:
    """Reports whether services are serving; at first they are not.

    Attributes:
        on_change: What is called, by any thread, after the reports have changed.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        """Reports on these services; an empty name stands for the server."""
        self._services = services
        self._is_serving = False
        self._is_closed = False
        self.on_change: list[Callable[[], object]] = []
        self._mutex = threading.Lock()

    def update(self, is_serving: Callable[[], bool]) -> None:
        """Asks whether the services are serving, and reports that from now on.

        It asks under a lock: of two threads at once, the one that asked first must not report last.
        """
        with self._mutex:
            self._report(is_serving=is_serving() and not self._is_closed)

    def close(self) -> None:
        """Reports for good that the services are not serving, and ends the watching calls."""
        with self._mutex:
            self._is_closed = True
            self._report(is_serving=False)

    def check(self, service: str) -> pb.HealthCheckResponse:
        """Returns the answer of `Check`.

        Raises:
            RpcError: There is no such service.
        """
        if service not in self._services:
            raise RpcError(grpc.StatusCode.NOT_FOUND.value[0], f"there is no service {cut(service)!r}")
        return _response(is_serving=self._is_serving)

    @property
    def is_closed(self) -> bool:
        """Whether nothing will be reported any more beside what is reported now."""
        return self._is_closed

    def watched(self, service: str) -> pb.HealthCheckResponse:
        """Returns what `Watch` reports now."""
        if service not in self._services:
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
        return _response(is_serving=self._is_serving)

    def _report(self, *, is_serving: bool) -> None:
        """Reports from now on whether the services are serving; the caller holds the mutex."""
        self._is_serving = is_serving
        for notify in self.on_change:
            notify()


def _response(*, is_serving: bool) -> pb.HealthCheckResponse:
    status = pb.HealthCheckResponse
    return pb.HealthCheckResponse(status=status.SERVING if is_serving else status.NOT_SERVING)
