"""The health service (gRPC's health checking protocol)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc


class Health(health_pb2_grpc.HealthServicer):
    """Says whether some services serve; at first they do not.

    In grpcio's own servicer, a client that watches, and does not take what it is told, stops all others.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        """Speaks for these services; one without a name stands for the server."""
        self._services = services
        self._is_serving = False
        self._is_over = False
        self._watchers: set[threading.Event] = set()
        self._mutex = threading.Lock()

    def set(self, *, serving: bool) -> None:
        """Says from now on whether they serve."""
        with self._mutex:
            self._is_serving = serving and not self._is_over
            for news in self._watchers:
                news.set()

    def close(self) -> None:
        """Says for good that they do not serve, and ends the calls of those who watch."""
        self._is_over = True
        self.set(serving=False)

    def Check(  # noqa: N802 - the protocol's name
        self, request: pb.HealthCheckRequest, context: grpc.ServicerContext
    ) -> pb.HealthCheckResponse:
        """See health.proto."""
        if request.service not in self._services:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        return _answer(is_serving=self._is_serving)

    def Watch(  # noqa: N802 - the protocol's name
        self, request: pb.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.HealthCheckResponse]:
        """See health.proto."""
        news = threading.Event()
        with self._mutex:
            self._watchers.add(news)
        try:
            yield from self._news(request.service, context, news)
        finally:
            with self._mutex:
                self._watchers.discard(news)

    def _news(
        self, service: str, context: grpc.ServicerContext, news: threading.Event
    ) -> Iterator[pb.HealthCheckResponse]:
        context.add_callback(news.set)
        if service not in self._services:
            yield pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
        said = None
        while context.is_active():
            is_over, is_serving = self._is_over, self._is_serving
            if is_serving is not said and service in self._services:
                said = is_serving
                yield _answer(is_serving=is_serving)
            if is_over:
                return
            news.wait()
            news.clear()


def _answer(*, is_serving: bool) -> pb.HealthCheckResponse:
    status = pb.HealthCheckResponse
    return pb.HealthCheckResponse(status=status.SERVING if is_serving else status.NOT_SERVING)
