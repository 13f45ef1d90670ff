"""Measures how loaded the server is, for the clients and proxies that share calls among several."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.scheduling.admission import Admission
from bngrad_server.scheduling.batch import BatchCounts
from bngrad_wire.http2 import header_block
from bngrad_wire.load_report import BINARY_HEADER, TEXT_HEADER, LoadReport

_INTERVAL_S = 0.2
"""How long a report lasts."""
_MEMORY_S = 2.0
"""What happened longer ago than this counts for less than a third."""


class LoadTrailers:
    """A report as the port sends it; empty if no request was measured, since Envoy logs errors for zeros.

    Attributes:
        block: The encoded headers.
    """

    def __init__(self, report: LoadReport) -> None:
        self.block = b""
        if report.capacity is not None:
            binary = header_block.encode_binary(report.binary())
            self.block = header_block.encode([(TEXT_HEADER, report.text()), (BINARY_HEADER, binary)])


class LoadListener:
    """A connection, which is told of the load, each report once."""

    def __init__(self) -> None:
        """Was told nothing yet."""
        self._last: LoadTrailers | None = None

    def needs(self, report: LoadTrailers) -> bool:
        """Whether an answer is to have the report, which then counts as told; for any thread."""
        is_new, self._last = report is not self._last, report
        return is_new


class LoadMeter:
    """Reports the rate of requests, how busy the workers are, and how many requests are in the server.

    Attributes:
        event_loop: Computes requests in its thread; the HTTP/2 port sets it.
    """

    event_loop: EventLoop | None = None

    def __init__(self, counts: BatchCounts, admission: Admission, slots: Callable[[], int]) -> None:
        """Measures from now on; ``slots`` returns how many batches the workers can compute at a time."""
        self._counts = counts
        self._admission = admission
        self._slots = slots
        self._mutex = threading.Lock()
        self._at = time.monotonic()
        self._before = (0, 0.0, 0.0)
        self._rate = self._busy = 0.0
        self._samples, self._requests = 0, 0
        self._due_at = 0.0
        self._trailers = LoadTrailers(LoadReport(0.0, 0.0, 0.0))

    @property
    def unread_connections(self) -> int:
        """How many connections wait for the event loop, most with requests, which it may compute itself."""
        return 0 if self.event_loop is None else self.event_loop.count_ready()

    @property
    def event_loop_busy_s(self) -> float:
        """For how many seconds the event loop's thread was busy, with requests and with their connections."""
        return 0.0 if self.event_loop is None else self.event_loop.busy_s

    def trailers(self) -> LoadTrailers:
        """Returns the report to send with an answer; the same one until there is a new one."""
        self._samples += 1
        self._requests += self._admission.admitted or 1  # one that the front process has computed is not admitted
        now = time.monotonic()
        if now >= self._due_at and self._mutex.acquire(blocking=False):
            try:
                if now < self._due_at + _INTERVAL_S:
                    self._measure(now)
                else:  # after a pause, one request tells little
                    self._due_at = now + _INTERVAL_S
            finally:
                self._mutex.release()
        return self._trailers

    def _measure(self, now: float) -> None:
        seconds = max(now - self._at, 1e-3)
        counts = self._counts.ended, self._counts.busy_s - self._counts.front_busy_s, self._counts.front_busy_s
        ended, workers_s, front_s = (new - old for new, old in zip(counts, self._before, strict=True))
        part = -math.expm1(-seconds / _MEMORY_S)
        self._rate += part * (ended / seconds - self._rate)
        busy_s = workers_s / max(self._slots(), 1) + front_s  # more workers make the front process no faster
        self._busy += part * (busy_s / seconds - self._busy)
        requests = self._requests / max(self._samples, 1) + self.unread_connections
        self._at, self._before, self._due_at = now, counts, now + _INTERVAL_S
        self._samples = self._requests = 0
        self._trailers = LoadTrailers(LoadReport(self._rate, self._busy, requests))
