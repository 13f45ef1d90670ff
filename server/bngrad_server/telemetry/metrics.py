"""What is counted of requests, at next to no cost: a small one takes the front process about 100 µs in all.

The moments of a request are only noted; what they say is worked out for hundreds of requests at once.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import Counter
from typing import Any, NamedTuple, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt

STAGES = ("decode", "wait", "copy", "compute", "encode")
"""Where the time of a request goes; together they are all of it."""
TRANSPORTS = ("unary", "stream", "shared")
REFUSALS = ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "UNIMPLEMENTED")
"""How calls end before it is known what they ask for."""
REASONS = ("full", "handshake", "protocol")
"""Why connections are refused: there are too many, TLS was not agreed on, or what was said is no HTTP/2."""
FIRST_BUCKET_S = 2e-6
"""The bound of the first bucket of times, in seconds; each further one has twice the bound of the one before."""

Moments: TypeAlias = tuple[float, float, float, float, float, float, float]
"""When a request's message was there, it was decoded, had memory, lay there and was queued, was begun by a worker, was
computed, and was answered: on the monotonic clock, in seconds."""


class Ended(NamedTuple):
    """A request that has ended: its op, transport and status, and when its message was there, see `Moments`."""

    op: str
    transport: str
    code: grpc.StatusCode
    received_at: float


_BUCKETS = 26
"""The last one has what is beyond the others, more than half a minute."""
_NOTE = struct.Struct("9d")
_MAX_NOTES = 512


class Metrics:
    """The requests since the start, for any thread."""

    def __init__(self, ops: tuple[str, ...]) -> None:
        self._mutex = threading.Lock()
        self._series = list(itertools.product(ops, TRANSPORTS))
        self._answers = np.zeros(len(self._series), np.int64)
        self._nbytes = np.zeros(len(self._series), np.int64)
        self._failures: Counter[tuple[str, str, str]] = Counter()
        self._refused_calls: Counter[str] = Counter()
        self._refused_connections: Counter[str] = Counter()
        self._notes = bytearray(_MAX_NOTES * _NOTE.size)
        self._noted = 0
        self._stages = _Histograms(STAGES)
        self._totals = _Histograms(TRANSPORTS)

    def answered(self, series: int, nbytes: int, moments: Moments) -> None:
        """Counts a request whose answer was given.

        Args:
            series: The number of its op, times the number of transports, plus the number of its transport.
            nbytes: The size of its tensors.
            moments: When what happened.
        """
        with self._mutex:
            _NOTE.pack_into(self._notes, self._noted * _NOTE.size, series, nbytes, *moments)
            self._noted += 1
            if self._noted == _MAX_NOTES:
                self._work_out()

    def failed(self, op: str, transport: str, code: str) -> None:
        """Counts a request that ended with another code than OK."""
        with self._mutex:
            self._failures[op, transport, code] += 1

    def refused_call(self, code: str) -> None:
        """Counts a call that ended before it was known what it asks for, with one of `REFUSALS`."""
        with self._mutex:
            self._refused_calls[code] += 1

    def refused_connection(self, reason: str) -> None:
        """Counts a connection that was closed on its client, for one of `REASONS`."""
        with self._mutex:
            self._refused_connections[reason] += 1

    def status(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        with self._mutex:
            self._work_out()
            answers = zip(self._series, self._answers.tolist(), strict=True)
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

    def _work_out(self) -> None:
        """Makes histograms of what was noted; the mutex is held."""
        notes = np.frombuffer(self._notes).reshape(-1, _NOTE.size // 8)[: self._noted]
        self._noted = 0
        series, moments = notes[:, 0].astype(np.intp), notes[:, 2:]
        np.add.at(self._answers, series, 1)
        np.add.at(self._nbytes, series, notes[:, 1].astype(np.int64))
        decode, memory, copy, queue, compute, encode = np.diff(moments).T
        for number, seconds in enumerate((decode, memory + queue, copy, compute, encode)):
            self._stages.observe(np.full(len(seconds), number), seconds)
        self._totals.observe(series % len(TRANSPORTS), moments[:, -1] - moments[:, 0])


class _Histograms:
    """Times by powers of two, for each of some names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._counts = np.zeros((len(names), _BUCKETS), np.int64)
        self._sums = np.zeros(len(names))

    def observe(self, names: npt.NDArray[np.intp], seconds: npt.NDArray[np.float64]) -> None:
        mantissas, exponents = np.frexp(seconds / FIRST_BUCKET_S)
        # A time that is a bound itself belongs below it.
        buckets = np.clip(exponents - (mantissas == 0.5), 0, _BUCKETS - 1)
        np.add.at(self._counts, (names, buckets), 1)
        np.add.at(self._sums, names, seconds)

    def status(self) -> dict[str, Any]:
        return {
            name: {"counts": counts.tolist(), "sum": float(total)}
            for name, counts, total in zip(self._names, self._counts, self._sums, strict=True)
        }
