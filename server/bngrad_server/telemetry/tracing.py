"""OpenTelemetry spans of requests, made from their timestamps after they have ended.

The span of each request is a child of the context in the client's metadata.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.request import Request
from bngrad_server.rpc_context import RpcContext
from bngrad_server.telemetry.metrics import Outcome, Timestamps
from bngrad_wire import __version__

_SERVICE = pb.DESCRIPTOR.services_by_name["BatchNormGradService"].full_name
_SPANS = ("decode", "wait for memory", "copy", "wait for a worker", "compute", "encode")
"""The spans between consecutive timestamps of a request."""
_READINGS = 3
_LAST_EXPORT_S = 3.0
_STATUS_CODE = "rpc.grpc.status_code"


class Tracing:
    """Exports spans by OTLP, as the OTEL_* variables say."""

    def __init__(self) -> None:
        defaults = Resource({SERVICE_NAME: "bngrad", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(
            resource=Resource.create().merge(defaults).merge(OTELResourceDetector().detect())
        )
        self._exporter = OTLPSpanExporter()
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("bngrad", __version__)

    def answered(self, request: Request, rpc: RpcContext, timestamps: Timestamps) -> None:
        """Makes the spans of a request that was answered."""
        outcome = Outcome(request.op.name, request.transport, grpc.StatusCode.OK, timestamps[0])
        epoch_ns = _clock()
        span = self._span(outcome, rpc, epoch_ns)
        if span.is_recording():
            span.set_attribute("bngrad.tensor_bytes", request.tensors_nbytes)
            context = trace.set_span_in_context(span)
            for name, start, end in zip(_SPANS, timestamps, timestamps[1:], strict=False):
                stage = self._tracer.start_span(name, context, start_time=epoch_ns(start))
                stage.end(epoch_ns(end))
        span.end(epoch_ns(timestamps[-1]))

    def failed(self, outcome: Outcome, rpc: RpcContext, message: str) -> None:
        """Makes the span of a request that was not answered."""
        span = self._span(outcome, rpc, _clock())
        span.set_status(StatusCode.ERROR, message)
        span.end()

    def close(self) -> None:
        """Exports the remaining spans, within 3 s."""
        time_limit = threading.Timer(_LAST_EXPORT_S, self._exporter.shutdown)
        time_limit.daemon = True
        time_limit.start()
        self._provider.shutdown()
        time_limit.cancel()

    def _span(self, outcome: Outcome, rpc: RpcContext, epoch_ns: Callable[[float], int]) -> trace.Span:
        """Begins the span of a request."""
        attributes: dict[str, Any] = {"bngrad.op": outcome.op, "bngrad.transport": outcome.transport}
        attributes[_STATUS_CODE] = outcome.code.value[0]
        method = "Exchange" if outcome.transport == "stream" else outcome.op
        attributes |= {"rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": method}
        context, start = extract(rpc.metadata), epoch_ns(outcome.received_at)
        name = f"{_SERVICE}/{method}"
        return self._tracer.start_span(name, context, SpanKind.SERVER, attributes, start_time=start)


def _clock() -> Callable[[float], int]:
    """Returns a function from seconds on the monotonic clock to nanoseconds since 1970.

    The offset comes from the fastest of several readings of both clocks, since a thread may be suspended between two.
    """
    readings = []
    for _ in range(_READINGS):
        before, now, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, now - before))
    _, offset = min(readings)
    return lambda seconds: int(1e9 * seconds) + offset
