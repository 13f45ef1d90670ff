"""Writes the server's status as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from bngrad_server.monitor.http import Response
from bngrad_server.telemetry.metrics import FIRST_BUCKET_S

Status: TypeAlias = dict[str, Any]
Value: TypeAlias = float | Mapping[str, float]
"""The value of a metric, or one for each value of its label."""


class Exposition:
    """Renders metrics in the format that the scraper accepts."""

    def __init__(self, front_pid: int) -> None:
        """Adds the ``process_`` metrics of the front process."""
        self._collector = _Collector()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)
        ProcessCollector(pid=lambda: front_pid, registry=self._registry)

    def render(self, status: Status, accept: str) -> Response:
        """Renders a status; see `bngrad_server.server.Server.status`."""
        self._collector.status = status
        try:
            return self._render(accept)
        except (TypeError, ValueError):  # the library compares versions that are no numbers
            return self._render("")

    def _render(self, accept: str) -> Response:
        encode, media_type = choose_encoder(accept)
        return Response(200, media_type, encode(self._registry))


class _Collector(Collector):
    status: Status | None = None

    def collect(self) -> Iterator[Metric]:
        if self.status is not None:  # as it is when the registry asks at the registration
            yield from _counters(self.status)
            yield from _gauges(self.status)
            yield from _histograms(self.status)


def _counters(status: Status) -> Iterator[Metric]:
    text = "Requests that ended, by op, transport and gRPC status code."
    requests = CounterMetricFamily("bngrad_requests", text, labels=("op", "transport", "code"))
    for *labels, count in status["requests"]:
        requests.add_metric(labels, count)
    yield requests
    text = "Calls that ended, by gRPC status code, before they became requests."
    yield _counter("bngrad_refused_calls", text, status["refused_calls"], "code")
    text = "Connections that the server closed on their clients."
    yield _counter("bngrad_refused_connections", text, status["refused_connections"], "reason")
    text = "Bytes of the tensors of the shape of x of answered requests, in and out."
    yield _counter("bngrad_tensor_bytes", text, status["tensor_bytes"], "transport")
    text = "Requests that were computed again since their worker died."
    yield _counter("bngrad_request_reruns", text, status["reruns"])
    text = "Tensors sent ahead that were evicted, since their memory was needed."
    yield _counter("bngrad_ahead_evicted", text, status["ahead"]["evicted"])
    text = "Requests that were given up since two workers had died of them."
    yield _counter("bngrad_quarantined_requests", text, status["quarantined"])
    text = "Failed requests that the log left out, since there were too many at once."
    yield _counter("bngrad_unlogged_failures", text, status["failures_left_out"])
    text = "How often the device's worker was started again."
    yield _counter("bngrad_worker_restarts", text, _by_device(status, "restarts"), "device")
    text = "Seconds in which the device's workers computed; its rate is the utilisation."
    yield _counter("bngrad_device_busy_seconds", text, _by_device(status, "busy_s"), "device")
    text = "Seconds in which the front process computed requests itself."
    yield _counter("bngrad_front_busy_seconds", text, status["front_busy_s"])
    text = "Seconds in which the event loop's thread was busy; its rate is the utilisation."
    yield _counter("bngrad_event_loop_busy_seconds", text, status["event_loop_busy_s"])


def _gauges(status: Status) -> Iterator[Metric]:
    queue, arena, regions = status["queue"], status["arena"], status["regions"]
    ready = [device for device in status["devices"] if device["state"] == "ready"]
    yield _gauge("bngrad_build_info", "The version of bngrad, in a label; always 1.", {status["version"]: 1}, "version")
    yield _gauge("bngrad_start_time_seconds", "When the server started, in seconds since 1970.", status["started_at"])
    text = "1 if a worker is ready and the server is not stopping, as /readyz says."
    yield _gauge("bngrad_ready", text, status["ready"])
    yield _gauge("bngrad_workers", "Workers that there should be.", len(status["devices"]))
    yield _gauge("bngrad_workers_ready", "Workers that take requests.", len(ready))
    text = "Requests in the server, whether received, waiting, computed or sent."
    yield _gauge("bngrad_requests_in_flight", text, status["in_flight"])
    yield _gauge("bngrad_queue_requests", "Requests that wait for a worker or the event loop.", queue["requests"])
    yield _gauge("bngrad_queue_bytes", "Bytes of the tensors of requests that wait for a worker.", queue["bytes"])
    yield _gauge("bngrad_arena_bytes", "Memory for the tensors of all requests in flight.", arena["bytes"])
    yield _gauge("bngrad_arena_used_bytes", "Memory of the arena that is in use.", arena["used"])
    yield _gauge("bngrad_ahead_tensors", "Tensors sent ahead that are here.", status["ahead"]["count"])
    text = "Memory of the arena that tensors sent ahead have, or are being received into; part of the same."
    yield _gauge("bngrad_ahead_bytes", text, status["ahead"]["bytes"])
    text = "Regions of memory that clients on this host share with the workers."
    yield _gauge("bngrad_shared_regions", text, regions["count"])
    text = "Memory of these regions, and of those whose lease has ended and that are not free yet."
    yield _gauge("bngrad_shared_region_bytes", text, regions["bytes"])
    text = "Memory of regions whose lease has ended but that clients still keep; part of the same."
    yield _gauge("bngrad_shared_region_kept_bytes", text, regions["kept"])
    text = "Connections that have made a call."
    yield _gauge("bngrad_connections", text, status["connections"])
    text = "The size of the device's own memory; 0 for a CPU."
    yield _gauge("bngrad_device_memory_bytes", text, _by_device(status, "memory_bytes"), "device")
    text = "How much of the device's own memory its worker has taken for tensors."
    yield _gauge("bngrad_device_memory_used_bytes", text, _by_device(status, "memory_used_bytes"), "device")
    text = "Memory of the host that the device's worker has in use, with what it shares."
    yield _gauge("bngrad_worker_memory_bytes", text, _by_device(status, "resident_bytes"), "device")


def _histograms(status: Status) -> Iterator[Metric]:
    text = "Seconds that answered requests spent in a stage: decode, wait, copy, compute or encode."
    yield _times("bngrad_stage_seconds", text, "stage", status["stages"])
    text = "Seconds from when a request's message was there until its answer was given to the transport."
    yield _times("bngrad_request_seconds", text, "transport", status["totals"])
    batches = status["batches"]
    text = "Requests in a batch; one that the front process computes is a batch of its own."
    sizes = HistogramMetricFamily("bngrad_batch_requests", text)
    sizes.add_metric([], _buckets(batches["sizes"], lambda k: 2.0 ** (k + 1) - 1), batches["requests"])
    yield sizes
    nbytes = HistogramMetricFamily("bngrad_batch_bytes", "Bytes of the tensors of a batch.")
    nbytes.add_metric([], _buckets(batches["nbytes"], lambda k: 2.0 ** (k + 1) - 1), batches["bytes"])
    yield nbytes


def _by_device(status: Status, key: str) -> dict[str, float]:
    return {device["name"]: device[key] for device in status["devices"]}


def _counter(name: str, text: str, value: Value, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), value)


def _gauge(name: str, text: str, value: Value, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), value)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, value: Value) -> Metric:
    if isinstance(value, Mapping):
        for label_value, each in value.items():
            family.add_metric([label_value], each)
    else:
        family.add_metric([], value)
    return family


def _times(name: str, text: str, label: str, of: dict[str, Any]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, histogram in of.items():
        family.add_metric([value], _buckets(histogram["counts"], lambda k: FIRST_BUCKET_S * 2**k), histogram["sum"])
    return family


def _buckets(counts: list[int], bound: Callable[[int], float]) -> list[tuple[str, float]]:
    """Returns cumulative buckets with their upper bounds; the last one has none."""
    bounds = [f"{bound(k):.10g}" for k in range(len(counts) - 1)]
    return list(zip([*bounds, "+Inf"], map(float, accumulate(counts)), strict=True))
