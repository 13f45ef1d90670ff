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
from tests.faults.harness import Fault, Harness, InvariantError, endure, warm_up
from tests.faults.load import Load, Tally
from tests.faults.machine_faults import shiftable_clock
from tests.faults.server import RestartableServer

_SECONDS = (2.0, 8.0)
_SHARE_AT_ONCE = 0.3
_MOST_AT_ONCE = 3


@dataclass
class Row:
    """What became of the requests during one kind of fault, and which promises were broken."""

    times: int = 0
    tally: Tally = field(default_factory=Tally)
    broken: list[str] = field(default_factory=list)


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="How long to go on; the last fault is finished.")
@click.option("--seed", default=None, type=int, help="Of the choices; drawn and told if not given.")
def main(minutes: float, seed: int | None) -> None:
    """Hurts a server at random while mixed load is on it; the exit code is 1 if any promise was broken."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are ended
    seed = Random().randrange(2**32) if seed is None else seed
    console = Console(width=None if sys.stdout.isatty() else 120)  # or a log would have the figures cut off
    console.print(f"seed {seed}")
    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[requests]} requests"))
    with _scenes() as scenes, Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        rows = soak(scenes, minutes * 60, Random(seed), progress)
    console.print(_table(rows))
    sys.exit(any(row.broken for row in rows.values()))


def soak(scenes: dict[bool, Harness], seconds: float, rng: Random, progress: Progress) -> dict[str, Row]:
    """Has every fault of the table once in a random order, and so on until the time is over.

    Args:
        scenes: The server for most faults, and under True the one that has /dev/shm for itself.
        seconds: How long.
        rng: What decides.
        progress: Where to show it.
    """
    rows: dict[str, Row] = defaultdict(Row)
    task = progress.add_task("", total=seconds, requests=0)
    begin = time.monotonic()
    waiting: list[Fault] = []
    at_first = resource_usage.measure(scenes[False].service)
    while (elapsed := time.monotonic() - begin) < seconds:
        waiting = waiting or rng.sample([*FAULTS, FULL], len(FAULTS) + 1)
        faults = _company(waiting.pop(), rng)
        name = " + ".join(fault.name for fault in faults)
        row = rows[name if len(faults) == 1 else "several at once"]
        requests = sum(row.tally.requests for row in rows.values())
        progress.update(task, completed=elapsed, description=name, requests=requests)
        row.times += 1
        try:
            row.tally.add(endure(scenes[faults == [FULL]], faults, rng.uniform(*_SECONDS), rng))
        except InvariantError as error:
            row.tally.add(error.tally)
            row.broken.append(str(error))
            progress.console.print(f"[red]{name}[/red]: {error}", markup=True, highlight=False)
    progress.update(task, completed=seconds)
    try:
        resource_usage.wait_until_back(scenes[False].service, at_first)
    except AssertionError as error:
        rows["all in all"].broken.append(str(error))
    return rows


def _company(first: Fault, rng: Random) -> list[Fault]:
    """The fault, and now and then others to happen at the same time."""
    others = [fault for fault in FAULTS if fault.mixes and fault is not first]
    if first.mixes and rng.random() < _SHARE_AT_ONCE:
        return [first, *rng.sample(others, rng.randint(1, _MOST_AT_ONCE - 1))]
    return [first]


@contextmanager
def _scenes() -> Iterator[dict[bool, Harness]]:
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
            scenes = {False: Harness(service, load, clock), True: Harness(confined, confined_load, clock)}
            for scene in scenes.values():
                warm_up(scene)
            yield scenes


def _table(rows: dict[str, Row]) -> Table:
    headings = ("times", "requests", "answered", "documented errors", "wrong", "lost", "broken promises")
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
