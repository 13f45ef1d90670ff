"""Random faults under load, one after the other and several at once: ``python -m tests.faults.soak --minutes 10``."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from tests.faults import resource_usage, workload
from tests.faults.catalog import FAULTS, FULL
from tests.faults.harness import BrokenGuaranteeError, Fault, Harness, endure, warm_up
from tests.faults.load import Load, Tally
from tests.faults.machine_faults import shiftable_clock
from tests.faults.server import RestartableServer

_SECONDS = (2.0, 8.0)
_SHARE_AT_ONCE = 0.3
_MOST_AT_ONCE = 3


@dataclass
class Row:
    """The outcomes of the requests during one kind of fault, and the guarantees broken."""

    times: int = 0
    tally: Tally = field(default_factory=Tally)
    broken: list[str] = field(default_factory=list)


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="Duration; the last fault is finished.")
@click.option("--seed", default=None, type=int, help="Seed of the choices; drawn and printed if not given.")
def main(minutes: float, seed: int | None) -> None:
    """Injects random faults into a server under mixed load; exits with 1 if any guarantee was broken."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that with blocks end the servers
    seed = Random().randrange(2**32) if seed is None else seed
    console = Console(width=None if sys.stdout.isatty() else 120)  # so that a log does not cut off the figures
    console.print(f"seed {seed}")
    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[requests]} requests"))
    with _harnesses() as harnesses, Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        rows = soak(harnesses, minutes * 60, Random(seed), progress)
    console.print(_table(rows))
    sys.exit(any(row.broken for row in rows.values()))


def soak(harnesses: dict[bool, Harness], seconds: float, rng: Random, progress: Progress) -> dict[str, Row]:
    """Injects every fault once in a random order, and repeats that until the time is over.

    ``harnesses`` holds the server for most faults, and under True the one with a private /dev/shm.
    """
    rows: dict[str, Row] = defaultdict(Row)
    task = progress.add_task("", total=seconds, requests=0)
    begin = time.monotonic()
    waiting: list[Fault] = []
    at_first = resource_usage.measure(harnesses[False].service)
    while (elapsed := time.monotonic() - begin) < seconds:
        waiting = waiting or rng.sample([*FAULTS, FULL], len(FAULTS) + 1)
        faults = _combined(waiting.pop(), rng)
        name = " + ".join(fault.name for fault in faults)
        row = rows[name if len(faults) == 1 else "several at once"]
        requests = sum(row.tally.requests for row in rows.values())
        progress.update(task, completed=elapsed, description=name, requests=requests)
        row.times += 1
        try:
            row.tally.add(endure(harnesses[faults == [FULL]], faults, rng.uniform(*_SECONDS), rng))
        except BrokenGuaranteeError as error:
            row.tally.add(error.tally)
            row.broken.append(str(error))
            progress.console.print(f"[red]{name}[/red]: {error}", markup=True, highlight=False)
    progress.update(task, completed=seconds)
    try:
        resource_usage.wait_until_back(harnesses[False].service, at_first)
    except AssertionError as error:
        rows["all in all"].broken.append(str(error))
    return rows


def _combined(first: Fault, rng: Random) -> list[Fault]:
    """Returns the fault, and sometimes others to inject at the same time."""
    others = [fault for fault in FAULTS if fault.mixes and fault is not first]
    if first.mixes and rng.random() < _SHARE_AT_ONCE:
        return [first, *rng.sample(others, rng.randint(1, _MOST_AT_ONCE - 1))]
    return [first]


@contextmanager
def _harnesses() -> Iterator[dict[bool, Harness]]:
    with tempfile.TemporaryDirectory(prefix="bngrad-soak-") as name:
        directory = Path(name)
        problems = directory / "problems"
        clock, environment = shiftable_clock(directory)
        with RestartableServer() as service:
            workload.save(workload.answered_alone(service.target), problems)
        with (
            RestartableServer(environment=environment) as service,
            RestartableServer(shm="256k") as confined,
            Load(service, problems) as load,
            Load(confined, problems) as confined_load,
        ):
            harnesses = {False: Harness(service, load, clock), True: Harness(confined, confined_load, clock)}
            for harness in harnesses.values():
                warm_up(harness)
            yield harnesses


def _table(rows: dict[str, Row]) -> Table:
    headings = ("times", "requests", "answered", "documented errors", "wrong", "lost", "broken guarantees")
    table = Table(Column("fault", no_wrap=True), *(Column(each, justify="right") for each in headings))
    total = Row()
    for row in rows.values():
        total.times += row.times
        total.tally.add(row.tally)
        total.broken += row.broken
    for name, row in [*sorted(rows.items()), ("total", total)]:
        counts = row.tally.counts
        lost = counts["lost"] + counts["undocumented"]
        figures = (row.times, row.tally.requests, counts["answered"], row.tally.statuses.total(), counts["wrong"], lost)
        table.add_row(name, *map(str, figures), str(len(row.broken)), style="red" if row.broken else None)
    return table


if __name__ == "__main__":
    main()
