"""Repeats a request from several threads for a while, and measures each call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np

import bngrad
from bngrad_cli.sample_requests import SampleRequest

_TICK_S = 0.1


@dataclass
class Measurement:
    """The measurement of a repeated request.

    Attributes:
        layer: The name of the shape.
        shape: The shape of the large tensors.
        transport: The transport of the tensors.
        nbytes: The bytes of the tensors of a call, sent and received.
        latencies_s: The time of each answered call, in seconds.
        seconds: The time of the whole measurement, in seconds.
        error: The error that ended it early, if any.
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
        """The requests answered per second."""
        return len(self.latencies_s) / self.seconds

    @property
    def gigabytes_per_s(self) -> float:
        """The tensors sent and received per second."""
        return self.requests_per_s * self.nbytes / 1e9

    def percentile_ms(self, percent: float) -> float:
        """Returns a percentile of the latencies in milliseconds."""
        return 1e3 * float(np.percentile(self.latencies_s, percent))

    @property
    def has_failed(self) -> bool:
        """Whether there was an error, other than that this server does not take such a request over this transport."""
        if isinstance(self.error, bngrad.ResourceExhaustedError) and self.error.retry_delay_s is None:
            return False  # the message is too large
        if self.transport == "shared" and isinstance(self.error, bngrad.UnavailableError):
            return False  # no memory is shared
        return self.error is not None


def measure(
    client: bngrad.Client,
    request: SampleRequest,
    measurement: Measurement,
    seconds: float,
    callers: int,
    stopping: threading.Event,
    on_tick: Callable[[], None],
) -> None:
    """Sends a request again and again from several threads, each after its last call was answered.

    Ctrl-C sets ``stopping`` and closes the client; the calls answered until then count. ``on_tick`` is called ten
    times a second meanwhile.
    """
    began = time.perf_counter()
    try:
        if measurement.transport == "shared":
            request = _in_shared_memory(request, client)
        _send(client, request, measurement.transport, lambda _: False)  # a first call, which may open connections
        began = time.perf_counter()

        def goes_on(latency_s: float) -> bool:
            measurement.latencies_s.append(latency_s)
            return not stopping.is_set() and time.perf_counter() < began + seconds

        with ThreadPoolExecutor(callers) as threads:
            running = [threads.submit(_send, client, request, measurement.transport, goes_on) for _ in range(callers)]
            try:
                while wait(running, _TICK_S).not_done:
                    on_tick()
            except (KeyboardInterrupt, SystemExit) as error:
                stopping.set()
                client.close()
                if isinstance(error, SystemExit):
                    raise
        for each in running:
            each.result()
    except KeyboardInterrupt:
        stopping.set()
    except bngrad.BngradError as error:
        if not stopping.is_set():
            measurement.error = error
    measurement.seconds = time.perf_counter() - began


def _send(client: bngrad.Client, request: SampleRequest, transport: str, goes_on: Callable[[float], bool]) -> None:
    """Sends a request until ``goes_on``, called with the seconds of each call, returns False."""
    y_backprop = request.inputs[0]
    out = client.empty(y_backprop.shape, y_backprop.dtype) if transport == "shared" else None
    while True:
        begin = time.perf_counter()
        request.send(client, out)
        if not goes_on(time.perf_counter() - begin):
            return


def _in_shared_memory(request: SampleRequest, client: bngrad.Client) -> SampleRequest:
    inputs = list(request.inputs)
    for index, array in enumerate(inputs[:2]):
        inputs[index] = client.empty(array.shape, array.dtype)
        np.copyto(inputs[index], array)
    return replace(request, inputs=tuple(inputs))
