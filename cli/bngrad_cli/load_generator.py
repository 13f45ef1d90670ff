"""Callers that repeat a request for a while, and how long each call took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np

import bngrad
from bngrad_cli.sample_requests import Request

_TICK_S = 0.1


@dataclass
class Measurement:
    """What came of a request that was repeated.

    Attributes:
        layer: What the shape is called.
        shape: The shape of the large tensors.
        transport: The way that they went.
        nbytes: The size of the tensors of a call, both ways, in bytes.
        latencies_s: How long each call took that was answered, in seconds.
        seconds: How long all of them took together.
        error: What ended it early, if anything did.
    """

    layer: str
    shape: tuple[int, ...]
    transport: str
    nbytes: int
    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    error: bngrad.BngradError | None = None

    @property
    def requests_per_s(self) -> float:
        """How many requests were answered in a second."""
        return len(self.latencies_s) / self.seconds

    @property
    def gigabytes_per_s(self) -> float:
        """The tensors that were sent and received in a second."""
        return self.requests_per_s * self.nbytes / 1e9

    def percentile_ms(self, percent: float) -> float:
        """What so many of the calls did not take longer than, in milliseconds."""
        return 1e3 * float(np.percentile(self.latencies_s, percent))

    @property
    def has_failed(self) -> bool:
        """Whether there was an error, other than that such a request cannot go this way to this server."""
        if isinstance(self.error, bngrad.ResourceExhaustedError) and self.error.retry_delay_s is None:
            return False  # It is too large.
        if self.transport == "shared" and isinstance(self.error, bngrad.UnavailableError):
            return False  # No memory is shared.
        return self.error is not None


def measure(
    client: bngrad.Client,
    request: Request,
    measurement: Measurement,
    seconds: float,
    callers: int,
    stopping: threading.Event,
    on_tick: Callable[[], None],
) -> None:
    """Has callers send a request, each as soon as its last one was answered.

    Ctrl-C sets ``stopping`` and closes the client; what was answered until then counts.

    Args:
        client: Makes the calls.
        request: What to send.
        measurement: Where to put what comes of it.
        seconds: How long to send.
        callers: How many there are.
        stopping: Ends it sooner.
        on_tick: Is called ten times a second meanwhile.
    """
    began = time.perf_counter()
    try:
        if measurement.transport == "shared":
            request = _in_shared_memory(request, client)
        _send(client, request, measurement.transport, lambda _: False)  # It may open connections.
        began = time.perf_counter()

        def goes_on(latency_s: float) -> bool:
            measurement.latencies_s.append(latency_s)
            return not stopping.is_set() and time.perf_counter() < began + seconds

        with ThreadPoolExecutor(callers) as threads:
            running = [threads.submit(_send, client, request, measurement.transport, goes_on) for _ in range(callers)]
            try:
                while wait(running, _TICK_S).not_done:
                    on_tick()
            except KeyboardInterrupt:
                stopping.set()
                client.close()
        for each in running:
            each.result()
    except KeyboardInterrupt:
        stopping.set()
    except bngrad.BngradError as error:
        if not stopping.is_set():
            measurement.error = error
    measurement.seconds = time.perf_counter() - began


def _send(client: bngrad.Client, request: Request, transport: str, goes_on: Callable[[float], bool]) -> None:
    """Sends a request until somebody, who is told how long each call took, has enough of it."""
    y_backprop = request.inputs[0]
    out = client.empty(y_backprop.shape, y_backprop.dtype) if transport == "shared" else None
    while True:
        begin = time.perf_counter()
        request.send(client, out)
        if not goes_on(time.perf_counter() - begin):
            return


def _in_shared_memory(request: Request, client: bngrad.Client) -> Request:
    inputs = list(request.inputs)
    for index, array in enumerate(inputs[:2]):
        inputs[index] = client.empty(array.shape, array.dtype)
        np.copyto(inputs[index], array)
    return replace(request, inputs=tuple(inputs))
