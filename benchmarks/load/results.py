"""The measurements of one run of the benchmark."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.measure import Step, middle
from benchmarks.load.server import Memory


@dataclass
class Storm:
    """The longest overload.

    Attributes:
        start: When it began, on the clock of the memory's samples.
        quiet: Single requests before any load, each after a pause, in milliseconds.
        after: The first single request after the storm, and those that followed.
    """

    step: Step
    start: float
    quiet: list[float]
    after: list[float]


@dataclass
class Kills:
    """The same requests with killed workers (disturbed) and without, in turns."""

    undisturbed: list[Step] = field(default_factory=list)
    disturbed: list[Step] = field(default_factory=list)
    killed: int = 0

    def count(self, *names: str) -> int:
        """Counts the requests of the disturbed turns with these outcomes; all without names."""
        return sum(n for step in self.disturbed for name, n in step.counts.items() if not names or name in names)


@dataclass
class Results:
    """All measurements; None or empty for parts that were left out.

    Attributes:
        timeout: The timeout of every request under load, in seconds.
        saturation: The turns of the closed loop.
        turns: The turns of the open loops, in order.
        memory: The server's memory, from before the first step until after the storm.
        batching: Requests per second of each turn with batches of the usual size, and with batches of one.
    """

    timeout: float
    saturation: list[Step] = field(default_factory=list)
    turns: list[Step] = field(default_factory=list)
    storm: Storm | None = None
    memory: Memory | None = None
    kills: Kills | None = None
    batching: dict[str, list[Step]] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        """The middle turn of each open loop, by rising load."""
        multiples = sorted({step.multiple for step in self.turns if step.multiple is not None})
        return [middle([step for step in self.turns if step.multiple == multiple]) for multiple in multiples]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
