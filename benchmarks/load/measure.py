"""What a load amounted to: goodput, latencies, counts."""

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
"""A request that leaves later than this was held up by the generator."""
_WARM_UP_S = 1.0
_WARM_UP_SHARE = 0.25


@dataclass(frozen=True)
class Step:
    """The figures of one load. The first second counts for nothing but the counts.

    Attributes:
        title: What it was.
        multiple: Of the saturation that was offered; None for a closed loop.
        offered: Requests per second that arrived.
        seconds: How long they did.
        goodput: Right answers within the timeout, per second in which requests arrived.
        megabytes: What these requests and answers hold, in MB per second.
        percentiles: Of their latency in milliseconds, from when they were due, in the order of `PERCENTILES`.
        counts: Requests by how they ended.
        late: The share of requests sent more than 10 ms after they were due, though a caller was free then: the
            generator was too slow.
        no_caller: The share of those sent so late, or never, since no caller was free when they were due: the server
            owed all of them an answer.
        in_flight: The most requests at once.
        server_cores: CPU seconds of the server per second; None where somebody else started it.
        generator_cores: Alike, of the generator.
        goodput_each_second: From the first second on.
        batch_sizes: Batches of 2**k to 2**(k+1)-1 requests; None where the server does not say.
        errors: Examples of what was neither OK nor refused nor too late.
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
    """Sums a run up; ``others`` are what it does not know of itself."""
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
    """The turn of median goodput of a load that had several; of an even number the lower one."""
    return sorted(turns, key=lambda step: step.goodput)[(len(turns) - 1) // 2]


def in_flight(moments: Floats, starts: Floats, ends: Floats) -> Counts:
    """How many intervals each moment is in; an interval holds its start, but not its end."""
    return np.searchsorted(np.sort(starts), moments, "right") - np.searchsorted(np.sort(ends), moments, "right")
