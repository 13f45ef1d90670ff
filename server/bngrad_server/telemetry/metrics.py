"""Counters and histograms of requests, at about 2 µs of the 100 µs that a small one takes the front process.

The timestamps of a request are only recorded; histograms are computed for hundreds of requests at once.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from typing import Any, NamedTuple, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt

from bngrad_server.codec.ops import SERIES, TRANSPORTS

STAGES = ("decode", "wait", "copy", "compute", "encode")
"""The stages of a request, which add up to its whole time."""
REFUSALS = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNIMPLEMENTED")
"""The status codes of calls that end before they become requests."""
REASONS = ("full", "handshake", "protocol", "silent")
"""Why connections are refused: there are too many, the TLS handshake failed, the peer breaks the rules of HTTP/2 or
floods it, or it begins no call, or does not end a frame, within seconds."""
FIRST_BUCKET_S = 2e-6
"""The upper bound of the first bucket of times, in seconds; each further bound is twice the one before."""

Timestamps: TypeAlias = tuple[float, float, float, float, float, float, float]
"""When a request was received, decoded, got memory, was copied there and queued, was begun by a worker, computed, and
answered: seconds on the monotonic clock."""


class Outcome(NamedTuple):
    """How a request ended: its op, transport and status, and the first of its `Timestamps`."""

    op: str
    transport: str
    code: grpc.StatusCode
    received_at: float


_BUCKETS = 26
"""The last bucket has no bound, and counts times above half a minute."""
_RECORD = struct.Struct("9d")
_MAX_RECORDS = 512


class Metrics:
    """Counts requests since the start; any thread may use it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._answers = np.zeros(len(SERIES), np.int64)
        self._nbytes = np.zeros(len(SERIES), np.int64)
        self._failures: Counter[tuple[str, str, str]] = Counter()
        self._refused_calls: Counter[str] = Counter()
        self._refused_connections: Counter[str] = Counter()
        self._records = bytearray(_MAX_RECORDS * _RECORD.size)
        self._recorded = 0
        self._stages = _Histograms(STAGES)
        self._totals = _Histograms(TRANSPORTS)

    def answered(self, series: int, nbytes: int, timestamps: Timestamps) -> None:
        """Counts a request that was answered.

        Args:
            series: The index of its op and transport in `SERIES`.
            nbytes: The size of its tensors.
            timestamps: Its timestamps.
        """
        with self._mutex:
            _RECORD.pack_into(self._records, self._recorded * _RECORD.size, series, nbytes, *timestamps)
            self._recorded += 1
            if self._recorded == _MAX_RECORDS:
                self._update_histograms()

    def failed(self, op: str, transport: str, code: str) -> None:
        """Counts a request that ended with an error code."""
        with self._mutex:
            self._failures[op, transport, code] += 1

    def refused_call(self, code: str) -> None:
        """Counts a call that ended before it became a request, with one of `REFUSALS`."""
        with self._mutex:
            self._refused_calls[code] += 1

    def refused_connection(self, reason: str) -> None:
        """Counts a connection that the server closed for one of `REASONS`."""
        with self._mutex:
            self._refused_connections[reason] += 1

    def status(self) -> dict[str, Any]:
        """Returns all counters and histograms, ready for JSON."""
        with self._mutex:
            self._update_histograms()
            answers = zip(SERIES, self._answers.tolist(), strict=True)
            requests = [
                *((op, transport, "OK", count) for (op, transport), count in answers if count),
                *((*labels, count) for labels, count in self._failures.items()),
            ]
            nbytes = self._nbytes.reshape(-1, len(TRANSPORTS)).sum(axis=0).tolist()
            return {
                "requests": sorted(requests),
                "refused_calls": {code: self._refused_calls[code] for code in REFUSALS},
                "refused_connections": {reason: self._refused_connections[reason] for reason in REASONS},
                "tensor_bytes": dict(zip(TRANSPORTS, nbytes, strict=True)),
                "stages": self._stages.status(),
                "totals": self._totals.status(),
            }

    def _update_histograms(self) -> None:
        """Moves the recorded requests into the histograms; the mutex is held."""
        records = np.frombuffer(self._records).reshape(-1, _RECORD.size // 8)[: self._recorded]
        self._recorded = 0
        series, timestamps = records[:, 0].astype(np.intp), records[:, 2:]
        np.add.at(self._answers, series, 1)
        np.add.at(self._nbytes, series, records[:, 1].astype(np.int64))
        decode, memory, copy, queue, compute, encode = np.diff(timestamps).T
        for number, seconds in enumerate((decode, memory + queue, copy, compute, encode)):
            self._stages.observe(np.full(len(seconds), number), seconds)
        self._totals.observe(series % len(TRANSPORTS), timestamps[:, -1] - timestamps[:, 0])


class _Histograms:
    """A histogram of times for each name, with buckets by powers of two."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._counts = np.zeros((len(names), _BUCKETS), np.int64)
        self._sums = np.zeros(len(names))

    def observe(self, names: npt.NDArray[np.intp], seconds: npt.NDArray[np.float64]) -> None:
        mantissas, exponents = np.frexp(seconds / FIRST_BUCKET_S)
        # A time equal to a bound belongs below it.
        buckets = np.clip(exponents - (mantissas == 0.5), 0, _BUCKETS - 1)
        np.add.at(self._counts, (names, buckets), 1)
        np.add.at(self._sums, names, seconds)

    def status(self) -> dict[str, Any]:
        return {
            name: {"counts": counts.tolist(), "sum": float(total)}
            for name, counts, total in zip(self._names, self._counts, self._sums, strict=True)
        }
