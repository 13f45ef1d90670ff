"""The bounds that a server should keep under load."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from benchmarks.load.measure import PERCENTILES, Step
from benchmarks.load.results import Results, Storm
from benchmarks.load.server import Memory

BATCHED, ALONE = "batched", "one request a batch"
_P99 = PERCENTILES.index(99)
_SETTLED_S = 10.0
"""The time after which memory should no longer grow during a storm."""


@dataclass(frozen=True)
class Verdict:
    target: str
    figure: float
    bound: float
    met: bool


def verdicts(results: Results) -> list[Verdict]:
    return [*_goodput(results), *_storm(results), *_kills(results), *_batching(results), *_honesty(results)]


def _at_least(target: str, figure: float, bound: float) -> Verdict:
    return Verdict(f"{target}, at least", float(figure), bound, bool(figure >= bound))


def _at_most(target: str, figure: float, bound: float) -> Verdict:
    return Verdict(f"{target}, at most", float(figure), bound, bool(figure <= bound))


def _loads(results: Results) -> list[Step]:
    return results.steps + ([results.storm.step] if results.storm else [])


def _goodput(results: Results) -> Iterator[Verdict]:
    over = [step for step in _loads(results) if step.multiple is not None and step.multiple > 1]
    if not over:
        return
    for unit, quantity in (("requests/s", attrgetter("goodput")), ("MB/s", attrgetter("megabytes"))):
        most = max(map(quantity, _loads(results)))
        share = min(map(quantity, over)) / most if most else 0.0
        yield _at_least(f"goodput past saturation / its maximum, {unit}", share, 0.9)
    p99 = max(step.percentiles[_P99] if step.percentiles else float("inf") for step in over) / 1e3
    yield _at_most("p99 of answered requests past saturation, in seconds", p99, results.timeout / 2)


def _storm(results: Results) -> Iterator[Verdict]:
    storm = results.storm
    if storm is None:
        return
    if results.memory is not None and storm.step.seconds > 2 * _SETTLED_S:
        growth = _growth(results.memory, storm)
        yield _at_most("resident memory at the end of the storm / 10 s into it", growth, 1.05)
    most = max(step.goodput for step in _loads(results))
    yield _at_least("goodput of the whole storm / its maximum, requests/s", storm.step.goodput / most, 0.9)
    first = storm.after[0] / statistics.median(storm.quiet)
    yield _at_most("first request after the storm / a quiet one before", first, 1.5)


def _growth(memory: Memory, storm: Storm) -> float:
    """Returns the median of the last ten seconds over that of the second ten."""
    since = np.array(memory.seconds) - storm.start
    total = np.add(memory.front, memory.workers)
    early = total[(since >= _SETTLED_S) & (since < 2 * _SETTLED_S)]
    late = total[(since >= storm.step.seconds - _SETTLED_S) & (since < storm.step.seconds)]
    return float(np.median(late) / np.median(early))


def _kills(results: Results) -> Iterator[Verdict]:
    kills = results.kills
    if kills is None:
        return
    rates = [statistics.median(step.goodput for step in steps) for steps in (kills.disturbed, kills.undisturbed)]
    wrong, right, total = kills.count("WRONG"), kills.count("OK"), kills.count()
    yield _at_most(f"lost of {total} requests while {kills.killed} workers were killed", total - right - wrong, 0)
    yield _at_most("wrong of them", wrong, 0)
    yield _at_least("requests/s while workers are killed / undisturbed", rates[0] / rates[1], 0.7)


def _batching(results: Results) -> Iterator[Verdict]:
    if results.batching:
        batched, alone = (statistics.median(s.goodput for s in results.batching[name]) for name in (BATCHED, ALONE))
        yield _at_least("4 KB requests/s, 64 callers / the same, one request a batch", batched / alone, 1.5)


def _honesty(results: Results) -> Iterator[Verdict]:
    loads = _loads(results)
    if loads:
        answered = [*results.turns, *loads]
        yield _at_most("wrong answers", sum(step.counts["WRONG"] for step in answered), 0)
        yield _at_most("share of requests that the generator itself sent late", max(step.late for step in loads), 0.01)
