"""Writes the server's status as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from bngrad_server.monitor.http import Response
from bngrad_server.telemetry.metrics import FIRST_BUCKET_S

Status = dict[str, Any]
Rows = Iterable[tuple[list[str], float]]
"""The values of a metric, each with the values of its labels."""


def _one(read: Callable[[Status], float]) -> Callable[[Status], Rows]:
    return lambda status: [([], float(read(status)))]


def _of_devices(read: Callable[[dict[str, Any]], float]) -> Callable[[Status], Rows]:
    return lambda status: [([device["name"]], float(read(device))) for device in status["devices"]]


def _is_ready(device: dict[str, Any]) -> bool:
    return bool(device["state"] == "ready")


_COUNTERS: tuple[tuple[str, str, tuple[str, ...], Callable[[Status], Rows]], ...] = (
    (
        *("bngrad_requests", "Requests that ended, by op, transport and gRPC status code."),
        *(("op", "transport", "code"), lambda status: [(labels, count) for *labels, count in status["requests"]]),
    ),
    (
        *("bngrad_refused_calls", "Calls that ended, by gRPC status code, before it was known what they ask for."),
        *(("code",), lambda status: [([code], count) for code, count in status["refused_calls"].items()]),
    ),
    (
        *("bngrad_refused_connections", "Connections to the server's own endpoint that were closed on their clients."),
        *(("reason",), lambda status: [([name], count) for name, count in status["refused_connections"].items()]),
    ),
    (
        *("bngrad_tensor_bytes", "Bytes of the tensors of the shape of x of answered requests, in and out."),
        *(("transport",), lambda status: [([name], nbytes) for name, nbytes in status["tensor_bytes"].items()]),
    ),
    (
        *("bngrad_request_reruns", "Requests that were computed again since their worker died."),
        *((), _one(lambda status: status["reruns"])),
    ),
    (
        *("bngrad_quarantined_requests", "Requests that were given up since two workers had died of them."),
        *((), _one(lambda status: status["quarantined"])),
    ),
    (
        *("bngrad_unlogged_failures", "Failed requests that the log left out, since there were too many at once."),
        *((), _one(lambda status: status["failures_left_out"])),
    ),
    (
        *("bngrad_worker_restarts", "How often the device's worker was started again."),
        *(("device",), _of_devices(lambda device: device["restarts"])),
    ),
    (
        *("bngrad_device_busy_seconds", "Seconds in which the device's workers computed; its rate is the utilisation."),
        *(("device",), _of_devices(lambda device: device["busy_s"])),
    ),
)
_GAUGES: tuple[tuple[str, str, tuple[str, ...], Callable[[Status], Rows]], ...] = (
    (
        *("bngrad_build_info", "The version of bngrad, in a label; always 1."),
        *(("version",), lambda status: [([status["version"]], 1)]),
    ),
    (
        *("bngrad_start_time_seconds", "When the server started, in seconds since 1970."),
        *((), _one(lambda status: status["started_at"])),
    ),
    (
        *("bngrad_ready", "1 if a worker is ready and the server is not stopping, as /readyz says."),
        *((), _one(lambda status: status["ready"])),
    ),
    (
        *("bngrad_workers", "Workers that there should be."),
        *((), _one(lambda status: len(status["devices"]))),
    ),
    (
        *("bngrad_workers_ready", "Workers that take requests."),
        *((), _one(lambda status: sum(map(_is_ready, status["devices"])))),
    ),
    (
        *("bngrad_requests_in_flight", "Requests in the server, whether received, waiting, computed or sent."),
        *((), _one(lambda status: status["in_flight"])),
    ),
    (
        *("bngrad_queue_requests", "Requests that wait for a worker."),
        *((), _one(lambda status: status["queue"]["requests"])),
    ),
    (
        *("bngrad_queue_bytes", "Bytes of the tensors of requests that wait for a worker."),
        *((), _one(lambda status: status["queue"]["bytes"])),
    ),
    (
        *("bngrad_arena_bytes", "Memory for the tensors of all requests in flight."),
        *((), _one(lambda status: status["arena"]["bytes"])),
    ),
    (
        *("bngrad_arena_used_bytes", "Memory of the arena that is in use."),
        *((), _one(lambda status: status["arena"]["used"])),
    ),
    (
        *("bngrad_shared_regions", "Regions of memory that clients on this host share with the workers."),
        *((), _one(lambda status: status["regions"]["count"])),
    ),
    (
        *("bngrad_shared_region_bytes", "Memory of these regions."),
        *((), _one(lambda status: status["regions"]["bytes"])),
    ),
    (
        *("bngrad_connections", "Connections to the endpoint for large tensors and for clients on this host."),
        *((), _one(lambda status: status["connections"])),
    ),
    (
        *("bngrad_device_memory_bytes", "The size of the device's own memory; 0 for a CPU."),
        *(("device",), _of_devices(lambda device: device["memory_bytes"])),
    ),
    (
        *("bngrad_device_memory_used_bytes", "How much of the device's own memory its worker has taken for tensors."),
        *(("device",), _of_devices(lambda device: device["memory_used_bytes"])),
    ),
    (
        *("bngrad_worker_memory_bytes", "Memory of the host that the device's worker has in use, with what it shares."),
        *(("device",), _of_devices(lambda device: device["resident_bytes"])),
    ),
)


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
        encode, media_type = choose_encoder(accept)
        return Response(200, media_type, encode(self._registry))


class _Collector(Collector):
    status: Status | None = None

    def collect(self) -> Iterator[Metric]:
        status = self.status
        if status is None:  # the registry asks when the collector is registered
            return
        for name, text, labels, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            for label_values, value in read(status):
                counter.add_metric(label_values, value)
            yield counter
        for name, text, labels, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for label_values, value in read(status):
                gauge.add_metric(label_values, value)
            yield gauge
        yield from _histograms(status)


def _histograms(status: Status) -> Iterator[Metric]:
    text = "Seconds that answered requests spent in a stage: decode, wait, copy, compute or encode."
    yield _times("bngrad_stage_seconds", text, "stage", status["stages"])
    text = "Seconds from when a request's message was there until its answer was given to the transport."
    yield _times("bngrad_request_seconds", text, "transport", status["totals"])
    batches = status["batches"]
    sizes = HistogramMetricFamily("bngrad_batch_requests", "Requests in a batch that a worker was given.")
    sizes.add_metric([], _buckets(batches["sizes"], lambda k: 2.0 ** (k + 1) - 1), batches["requests"])
    yield sizes
    nbytes = HistogramMetricFamily("bngrad_batch_bytes", "Bytes of the tensors of a batch.")
    nbytes.add_metric([], _buckets(batches["nbytes"], lambda k: 2.0 ** (k + 1) - 1), batches["bytes"])
    yield nbytes


def _times(name: str, text: str, label: str, of: dict[str, Any]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, histogram in of.items():
        family.add_metric([value], _buckets(histogram["counts"], lambda k: FIRST_BUCKET_S * 2**k), histogram["sum"])
    return family


def _buckets(counts: list[int], bound: Callable[[int], float]) -> list[tuple[str, float]]:
    """Returns cumulative buckets with their upper bounds; the last one has none."""
    bounds = [f"{bound(k):.10g}" for k in range(len(counts) - 1)]
    return list(zip([*bounds, "+Inf"], map(float, accumulate(counts)), strict=True))
