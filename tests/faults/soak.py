"""Random faults under load, one after the other and several at once: ``python -m tests.faults.soak --minutes 10``.

With ``--attacks``, every attack of `benchmarks.hostile` is among them, on a server of its own that asks for tokens.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from tests.faults import resource_usage, workload
from tests.faults.attack_faults import ATTACK_FAULTS, ATTACKED
from tests.faults.catalog import BESIDE_ATTACKS, CONFINED, FAULTS, FULL
from tests.faults.harness import USUAL, BrokenGuaranteeError, Fault, Harness, endure, warm_up
from tests.faults.load import Load, Tally
from tests.faults.machine_faults import shiftable_clock
from tests.faults.server import RestartableServer

_SECONDS = (2.0, 8.0)
_SHARE_AT_ONCE = 0.3
_SHARE_OF_ATTACKS_AT_ONCE = 0.5
_MOST_AT_ONCE = 3
_AT_ONCE = "several at once"
_ATTACKS_AT_ONCE = "several attacks at once"


@dataclass
class Row:
    """The outcomes of the requests during one kind of fault, and the guarantees broken."""

    times: int = 0
    tally: Tally = field(default_factory=Tally)
    broken: list[str] = field(default_factory=list)


@click.command()
@click.option("--minutes", default=10.0, show_default=True, help="Duration; the last fault is finished.")
@click.option("--seed", default=None, type=int, help="Seed of the choices; drawn and printed if not given.")
@click.option("--attacks", is_flag=True, help="Mixes in every attack of benchmarks.hostile.")
def main(minutes: float, seed: int | None, attacks: bool) -> None:
    """Injects random faults into a server under mixed load; exits with 1 if any guarantee was broken."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that with blocks end the servers
    seed = Random().randrange(2**32) if seed is None else seed
    console = Console(width=None if sys.stdout.isatty() else 120)  # so that a log does not cut off the figures
    console.print(f"seed {seed}")
    faults = [*FAULTS, FULL, *(ATTACK_FAULTS if attacks else ())]
    columns = (BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[requests]} requests"))
    with (
        _harnesses({fault.server for fault in faults}) as harnesses,
        Progress(*columns, TextColumn("{task.description}"), console=console) as progress,
    ):
        at_first = {name: resource_usage.measure(harness.service) for name, harness in harnesses.items()}
        rows = soak(harnesses, faults, minutes * 60, Random(seed), progress)
        for name, harness in harnesses.items():
            _check_resources(name, harness, at_first[name], rows, console)
    console.print(_table(rows))
    sys.exit(any(row.broken for row in rows.values()))


def soak(
    harnesses: dict[str, Harness], faults: list[Fault], seconds: float, rng: Random, progress: Progress
) -> dict[str, Row]:
    """Injects every fault once in a random order, and repeats that until the time is over."""
    rows: dict[str, Row] = defaultdict(Row)
    task = progress.add_task("", total=seconds, requests=0)
    begin = time.monotonic()
    waiting: list[Fault] = []
    while (elapsed := time.monotonic() - begin) < seconds:
        waiting = waiting or rng.sample(faults, len(faults))
        together = _combined(waiting.pop(), rng)
        name = " + ".join(fault.name for fault in together)
        row = rows[name if len(together) == 1 else _ATTACKS_AT_ONCE if together[0].server == ATTACKED else _AT_ONCE]
        requests = sum(row.tally.requests for row in rows.values())
        progress.update(task, completed=elapsed, description=name, requests=requests)
        row.times += 1
        try:
            row.tally.add(endure(harnesses[together[0].server], together, rng.uniform(*_SECONDS), rng))
        except BrokenGuaranteeError as error:
            row.tally.add(error.tally)
            row.broken.append(str(error))
            progress.console.print(f"[red]{name}[/red]: {error}", markup=True, highlight=False)
    progress.update(task, completed=seconds)
    return rows


def _combined(first: Fault, rng: Random) -> list[Fault]:
    """Returns the fault, and sometimes others to inject at the same time."""
    is_attack = first.server == ATTACKED
    others = [*ATTACK_FAULTS, *BESIDE_ATTACKS] if is_attack else FAULTS
    others = [fault for fault in others if fault.mixes and fault is not first]
    if first.mixes and rng.random() < (_SHARE_OF_ATTACKS_AT_ONCE if is_attack else _SHARE_AT_ONCE):
        return [first, *rng.sample(others, rng.randint(1, _MOST_AT_ONCE - 1))]
    return [first]


def _check_resources(
    name: str, harness: Harness, at_first: resource_usage.Usage, rows: dict[str, Row], console: Console
) -> None:
    """Prints what a quiet server holds at the end and held at first, and checks that it has not grown."""
    try:
        resource_usage.wait_until_back(harness.service, at_first)
    except AssertionError as error:
        rows["all in all"].broken.append(str(error))
        console.print(f"[red]{name} server[/red]: {error}", highlight=False)
    now = resource_usage.measure(harness.service)
    for whose in ("front", "workers"):
        then, here = getattr(at_first, whose), getattr(now, whose)
        memory = f"{then.memory / resource_usage.MIB:.0f} -> {here.memory / resource_usage.MIB:.0f} MiB"
        counts = f"{then.threads} -> {here.threads} threads, {then.descriptors} -> {here.descriptors} descriptors"
        console.print(f"{name} server, {whose}: {memory}, {counts}", highlight=False)


@contextmanager
def _harnesses(names: set[str]) -> Iterator[dict[str, Harness]]:
    """Runs the named servers, each under load while faults are injected."""
    with tempfile.TemporaryDirectory(prefix="bngrad-soak-") as directory, ExitStack() as stack:
        problems = Path(directory) / "problems"
        clock, environment = shiftable_clock(Path(directory))
        with RestartableServer() as service:
            workload.save(workload.answered_alone(service.target), problems)
        options: dict[str, dict[str, Any]] = {
            USUAL: {"environment": environment},
            CONFINED: {"shm": "256k"},
            ATTACKED: {"environment": environment, "is_attacked": True},
        }
        harnesses = {}
        for name in sorted(names):
            service = stack.enter_context(RestartableServer(**options[name]))
            harnesses[name] = Harness(service, stack.enter_context(Load(service, problems)), clock)
            warm_up(harnesses[name])
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
