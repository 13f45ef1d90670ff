"""Rates and latencies of the last three minutes, computed from growing counters."""

from __future__ import annotations

from collections import deque
from typing import Any

from bngrad_server.telemetry.metrics import FIRST_BUCKET_S, STAGES

_POINTS = 180
_RECENT_S = 60.0


class History:
    """Keeps samples of the server's status, and the changes between them."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, Any]] = deque(maxlen=_POINTS)
        self._points: deque[dict[str, Any]] = deque(maxlen=_POINTS)

    def add(self, status: dict[str, Any]) -> None:
        """Adds a sample."""
        if self._samples and status["time"] < self._samples[-1]["time"]:  # the clock was set back
            self._samples.clear()
            self._points.clear()
        if self._samples and status["time"] > self._samples[-1]["time"]:
            self._points.append(_point(self._samples[-1], status))
        # 180 times the failures that clients can cause would take megabytes.
        self._samples.append({name: value for name, value in status.items() if name != "failures"})

    def status(self) -> dict[str, Any]:
        """Returns the changes, the oldest first, and those of the last minute together, ready for JSON."""
        points = list(self._points)
        if not points:
            return {"points": [], "recent": None}
        end = self._samples[-1]
        begin = next(sample for sample in self._samples if end["time"] - sample["time"] <= _RECENT_S)
        return {"points": points, "recent": _recent(begin, end)}


def quantile(counts: list[int], q: float) -> float | None:
    """Returns a quantile of a histogram of times, in seconds, as Prometheus estimates it; None if it is empty."""
    rank, seen = q * sum(counts), 0
    for bucket, count in enumerate(counts):
        if count and seen + count >= rank:
            upper = FIRST_BUCKET_S * 2.0**bucket
            lower = upper / 2 if bucket else 0.0
            return lower + (upper - lower) * (rank - seen) / count
        seen += count
    return None


def _point(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    seconds = after["time"] - before["time"]
    counts = _latencies(before, after)
    old_busy = _busy(before)
    return {
        "time": after["time"],
        "answered": (_answered(after) - _answered(before)) / seconds,
        "failed": (_failed(after) - _failed(before)) / seconds,
        "bytes": (sum(after["tensor_bytes"].values()) - sum(before["tensor_bytes"].values())) / seconds,
        "p50": quantile(counts, 0.5),
        "p99": quantile(counts, 0.99),
        "queue": after["queue"]["requests"],
        "in_flight": after["in_flight"],
        "busy": {name: min((busy_s - old_busy.get(name, 0.0)) / seconds, 1.0) for name, busy_s in _busy(after).items()},
    }


def _busy(status: dict[str, Any]) -> dict[str, float]:
    """For how long each device computed; "front" is the event loop, which has more to do than to compute."""
    return {"front": status["event_loop_busy_s"], **{device["name"]: device["busy_s"] for device in status["devices"]}}


def _recent(begin: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    counts = _latencies(begin, end)
    answered = sum(counts)
    stage_sums = {name: end["stages"][name]["sum"] - begin["stages"][name]["sum"] for name in STAGES}
    batches = sum(end["batches"]["sizes"]) - sum(begin["batches"]["sizes"])
    return {
        "seconds": end["time"] - begin["time"],
        "answered": answered,
        "failed": _failed(end) - _failed(begin),
        "first_bound": FIRST_BUCKET_S,
        "counts": counts,
        **{f"p{q}": quantile(counts, q / 100) for q in (50, 90, 99)},
        "stages": {name: total / answered if answered else None for name, total in stage_sums.items()},
        "batch_requests": (end["batches"]["requests"] - begin["batches"]["requests"]) / batches if batches else None,
    }


def _answered(status: dict[str, Any]) -> int:
    return sum(count for *_, code, count in status["requests"] if code == "OK")


def _failed(status: dict[str, Any]) -> int:
    return sum(count for *_, code, count in status["requests"] if code != "OK")


def _latencies(before: dict[str, Any], after: dict[str, Any]) -> list[int]:
    """Returns the histogram of the requests answered between two samples."""
    columns = [
        [new - old for new, old in zip(after["totals"][name]["counts"], before["totals"][name]["counts"], strict=True)]
        for name in after["totals"]
    ]
    return [sum(bucket) for bucket in zip(*columns, strict=True)]
