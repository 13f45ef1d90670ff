"""The figures of a load: goodput, latencies, counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.load.answers import Status
from benchmarks.load.fleet import Run
from benchmarks.load.mix import Item
from benchmarks.load.schedule import Floats

Counts = np.ndarray[Any, np.dtype[np.int64]]

PERCENTILES = (50, 90, 99, 99.9)
LATE_S = 0.01
"""A request sent later than this after it was due counts as late."""
_WARM_UP_S = 1.0
_WARM_UP_SHARE = 0.25


@dataclass(frozen=True)
class Step:
    """The figures of one load. Only the counts include the first second.

    Attributes:
        multiple: The offered load as a multiple of saturation; None for a closed loop.
        offered: Requests per second that arrived.
        seconds: The duration of the arrivals.
        goodput: Right answers within the timeout, per second in which requests arrived.
        megabytes: What these requests and answers hold, in MB per second.
        percentiles: Of their latency in milliseconds, from when they were due, in the order of `PERCENTILES`.
        late: The share of requests sent more than 10 ms after they were due although a caller was free: the
            generator was too slow.
        no_caller: The share sent late or never because no caller was free when they were due: all waited for the
            server.
        server_cores: CPU seconds of the server per second; None if the benchmark did not start it.
        generator_cores: CPU seconds of the generator per second.
        goodput_each_second: From the first second on.
        batch_sizes: Batches of 2**k to 2**(k+1)-1 requests; None if the server does not report them.
        errors: Examples of other errors than refusals and timeouts.
    """

    title: str
    multiple: float | None
    offered: float
    seconds: float
    goodput: float
    megabytes: float
    percentiles: list[float]
    counts: dict[str, int]
    late: float
    no_caller: float
    in_flight: int
    server_cores: float | None
    generator_cores: float
    goodput_each_second: list[float]
    batch_sizes: list[int] | None
    errors: list[str]


def step(title: str, multiple: float | None, run: Run, items: tuple[Item, ...], **others: Any) -> Step:
    """Computes a run's figures; ``others`` are those that the run does not hold."""
    item, due, sent, done, status, waited = np.array(run.outcome.rows).T
    warm = run.start + min(_WARM_UP_S, _WARM_UP_SHARE * run.seconds)
    end = run.start + run.seconds
    good = status == Status.OK
    counted = good & (done >= warm) & (done < end)
    nbytes = np.array([item.nbytes for item in items])[item[counted].astype(int)]
    latencies = 1e3 * (done - due)[good & (done >= warm)]
    went = status != Status.NOT_SENT
    held_up = sent - due > LATE_S
    seconds = np.arange(run.start, end + 1)
    each_second = np.histogram(done[good], seconds)[0] if len(seconds) > 1 else np.zeros(0)
    return Step(
        title,
        multiple,
        offered=len(due) / run.seconds,
        seconds=run.seconds,
        goodput=float(counted.sum() / (end - warm)),
        megabytes=float(nbytes.sum() / (end - warm) / 1e6),
        percentiles=[float(value) for value in np.percentile(latencies, PERCENTILES)] if latencies.size else [],
        counts={each.name: int((status == each).sum()) for each in Status},
        late=float(np.mean(held_up & (waited == 0))),
        no_caller=float(np.mean(held_up & (waited == 1))),
        in_flight=int(in_flight(sent[went], sent[went], done[went]).max(initial=0)),
        goodput_each_second=each_second.tolist(),
        errors=run.outcome.errors,
        **others,
    )


def middle(turns: list[Step]) -> Step:
    """Returns the turn with the median goodput; the lower one of an even number."""
    return sorted(turns, key=lambda step: step.goodput)[(len(turns) - 1) // 2]


def in_flight(moments: Floats, starts: Floats, ends: Floats) -> Counts:
    """Counts the half-open intervals that contain each moment."""
    return np.searchsorted(np.sort(starts), moments, "right") - np.searchsorted(np.sort(ends), moments, "right")
