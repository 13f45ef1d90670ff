"""The counters and histograms of requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bngrad_server.codec.ops import OPS, TRANSPORTS
from bngrad_server.monitor.history import quantile
from bngrad_server.telemetry.metrics import FIRST_BUCKET_S, STAGES, Metrics, Timestamps

BUCKETS = 26


def timestamps(*seconds: float) -> Timestamps:
    """Returns timestamps with these seconds between them."""
    passed = [1000.0]
    for each in seconds:
        passed.append(passed[-1] + each)
    a, b, c, d, e, f, g = passed
    return a, b, c, d, e, f, g


def counted(*seconds: float, times: int = 1) -> dict[str, Any]:
    metrics = Metrics()
    for _ in range(times):
        metrics.answered(TRANSPORTS.index("shared"), 12, timestamps(*seconds))
    return metrics.status()


def test_the_stages_add_up_to_the_total() -> None:
    status = counted(0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    assert [status["stages"][name]["sum"] for name in STAGES] == [0.25, 0.5 + 2.0, 1.0, 4.0, 8.0]
    assert status["totals"]["shared"]["sum"] == 15.75


@pytest.mark.parametrize("times", [1, 511, 512, 513, 5000])
def test_no_request_is_lost_or_counted_twice(times: int) -> None:
    status = counted(0.25, 0.5, 1.0, 2.0, 4.0, 8.0, times=times)
    assert status["requests"] == [(OPS[0].name, "shared", "OK", times)]
    assert status["tensor_bytes"] == {"unary": 0, "stream": 0, "shared": 12 * times}
    assert all(sum(stage["counts"]) == times for stage in status["stages"].values())


def test_requests_of_several_threads_are_all_counted() -> None:
    metrics, (first, second) = Metrics(), (op.name for op in OPS[:2])

    def work(series: int) -> None:
        for _ in range(2000):
            metrics.answered(series, 1, timestamps(*[0.001] * 6))
            metrics.failed(first, "unary", "INTERNAL")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    counts = {tuple(labels): count for *labels, count in metrics.status()["requests"]}
    assert counts.pop((first, "unary", "INTERNAL")) == 12000
    assert counts == {(op, transport, "OK"): 2000 for op in (first, second) for transport in TRANSPORTS}


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (0.0, 0),
        (2.0**-20, 0),  # just under 1 µs
        (FIRST_BUCKET_S * 1.5, 1),
        (1.0, 19),
        (1e4, BUCKETS - 1),
    ],
)
def test_a_time_is_counted_in_the_bucket_below_its_bound(seconds: float, bucket: int) -> None:
    counts = counted(0, 0, 0, 0, seconds, 0)["stages"]["compute"]["counts"]
    assert [k for k, count in enumerate(counts) if count] == [bucket]
    assert seconds <= FIRST_BUCKET_S * 2**bucket or bucket == BUCKETS - 1


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [([0, 0], 0.5, None), ([4, 0], 0.5, 1e-6), ([0, 4], 0.5, 3e-6), ([0, 4], 1.0, 4e-6), ([2, 2], 0.5, 2e-6)],
)
def test_quantiles_are_estimated_as_by_prometheus(counts: list[int], q: float, expected: float | None) -> None:
    assert quantile(counts, q) == (None if expected is None else pytest.approx(expected))
