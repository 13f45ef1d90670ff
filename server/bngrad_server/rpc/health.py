"""The health service (gRPC's health checking protocol)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc
from grpc_health.v1 import health
from grpc_health.v1 import health_pb2 as pb

from bngrad_server.errors import cut
from bngrad_wire.http2 import RpcError


class Health:
    """Reports whether services are serving; at first they are not.

    It replaces grpcio's own servicer, in which a watching client that does not read blocks all other clients.

    Attributes:
        on_change: What is called, by any thread, after the reports have changed.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        """Reports on these services; an empty name stands for the server."""
        self._services = services
        self._is_serving = False
        self._is_closed = False
        self.on_change: list[Callable[[], object]] = []
        self._watchers: set[threading.Event] = set()
        self._mutex = threading.Lock()

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns what handles calls at grpcio's port; the library's would add methods of its newer versions."""
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self.Check, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self.Watch, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

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

    def Check(self, request: pb.HealthCheckRequest, context: grpc.ServicerContext) -> pb.HealthCheckResponse:  # noqa: N802 - the protocol's name
        """See health.proto."""
        try:
            return self.check(request.service)
        except RpcError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, error.message)

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

    def Watch(self, request: pb.HealthCheckRequest, context: grpc.ServicerContext) -> Iterator[pb.HealthCheckResponse]:  # noqa: N802
        """See health.proto."""
        changed = threading.Event()
        with self._mutex:
            self._watchers.add(changed)
        try:
            yield from self._changes(request.service, context, changed)
        finally:
            with self._mutex:
                self._watchers.discard(changed)

    def _report(self, *, is_serving: bool) -> None:
        """Reports from now on whether the services are serving; the caller holds the mutex."""
        self._is_serving = is_serving
        for changed in self._watchers:
            changed.set()
        for notify in self.on_change:
            notify()

    def _changes(
        self, service: str, context: grpc.ServicerContext, changed: threading.Event
    ) -> Iterator[pb.HealthCheckResponse]:
        context.add_callback(changed.set)
        if service not in self._services:
            yield self.watched(service)
        reported = None
        while context.is_active():
            with self._mutex:  # closed, but still serving, would end the call without a last report
                is_closed, is_serving = self._is_closed, self._is_serving
            if is_serving is not reported and service in self._services:
                reported = is_serving
                yield _response(is_serving=is_serving)
            if is_closed:
                return
            changed.wait()
            changed.clear()


def _response(*, is_serving: bool) -> pb.HealthCheckResponse:
    status = pb.HealthCheckResponse
    return pb.HealthCheckResponse(status=status.SERVING if is_serving else status.NOT_SERVING)
