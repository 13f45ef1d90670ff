"""Measures what attacks cost good clients: p99 at every door during an attack and after it, against a quiet server.

The server has several tenants with tokens, TLS on TCP, a small arena, and limits for each client where an attack is
about them. Attackers have the lowest CPU priority: real ones would have their own machine. On a machine with other
work, ``chrt -r 10`` before the command gives the server and the good clients real-time priority, and attackers what
they leave.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.hostile import good_client
from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.results import (
    Figures,
    Latencies,
    Outcome,
    Report,
    figures,
    print_head,
    print_row,
    usual,
    verdict,
    write_page,
)
from benchmarks.hostile.scene import ARENA_BYTES, BOUND_BYTES, CLIENT_BYTES, GoodClient, PeakMemory, Scene, serving
from benchmarks.hostile.victim import DOORS
from benchmarks.kernels import report

_SETTLE_S = 1.0
_PAUSE_S = 2.0
_AFTER_S = 2.0
_CONTROL_EVERY = 6
_PACKAGES = ("grpcio", "hpack", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_hostile", description=__doc__)
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument(
        "--doors", nargs="+", choices=good_client.DOORS, default=good_client.DOORS, help="of good clients"
    )
    parser.add_argument("--only", nargs="+", choices=DOORS, help="doors to attack, instead of all of each attack")
    parser.add_argument("--seconds", type=float, default=4, help="of each attack that are measured")
    parser.add_argument("--turns", type=int, default=3, help="of each attack; the middle p99 counts")
    parser.add_argument("--plain", action="store_true", help="no TLS")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers and the machine's facts")
    parser.add_argument("--page", type=Path, metavar="PATH", help="also write the tables of docs/attacks.md")
    parser.add_argument("--merge", action="store_true", help="keep what the JSON file says of other attacks")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that with blocks end the servers.
    attacks = [ATTACKS[name] for name in options.attacks]
    machine = report.machine({name: metadata.version(name) for name in _PACKAGES}, os.cpu_count() or 0)
    results = Report(machine, options.turns)
    print_head(options.doors)
    for is_limited in (True, False):
        chosen = [attack for attack in attacks if attack.is_limited is is_limited]
        if chosen:
            _measure(chosen, options, results)
    print()
    print("\n".join(verdict(results)))
    if options.merge and options.json.exists():
        results = Report(**json.loads(options.json.read_text())["report"]).updated(results, list(ATTACKS))
    if options.json:
        bound = {"arena_bytes": ARENA_BYTES, "client_bytes": CLIENT_BYTES, "bound_bytes": BOUND_BYTES}
        facts = {"seconds": options.seconds, "tls": not options.plain, **bound}
        options.json.write_text(json.dumps(facts | {"report": dataclasses.asdict(results)}, indent=1) + "\n")
    if options.page:
        write_page(options.page, results)


def _measure(attacks: list[Attack], options: argparse.Namespace, results: Report) -> None:
    """Measures attacks in turns, and in the same way, now and then, what no attack does: the controls."""
    is_limited = attacks[0].is_limited
    rows: list[tuple[Attack | None, list[Outcome]]] = [(attack, []) for attack in attacks]
    for place in range(0, len(attacks) + 1, _CONTROL_EVERY)[::-1]:
        rows.insert(place, (None, []))
    quiet: list[Outcome] = []
    with (
        serving(tls=not options.plain, is_limited=is_limited) as scene,
        _good_clients(scene, options.doors) as clients,
    ):
        memory = PeakMemory(scene.server.process.pid)
        _call(clients, _SETTLE_S)
        for _, (attack, turns) in itertools.product(range(options.turns), rows):
            outcome = _attack(attack, scene, clients, memory, options)
            turns.append(outcome)
            if attack is None:
                quiet.append(outcome)
            _show("nothing" if attack is None else attack.name, figures([outcome], quiet))
            for remark in (outcome.remark, *(errors[0] for errors in outcome.errors.values() if errors)):
                if remark:
                    print(f"{'':24}{remark[:150]}")
        memory.close()
    results.quiet["with limits" if is_limited else "without limits"] = {
        door: usual([outcome.during[door] for outcome in quiet]) for door in options.doors
    }
    for attack, turns in rows:
        row = figures(turns, quiet)
        if attack is None:
            results.controls.append(row)
        else:
            facts = {"description": attack.description, "commit": results.machine["commit"]}
            results.attacks[attack.name] = row | facts


def _show(name: str, row: Figures) -> None:
    print_row(name, row["doors"], f"{row['grown_bytes'] / 1e6:6.0f} {row['kept_bytes'] / 1e6:6.0f}")


def _attack(
    attack: Attack | None, scene: Scene, clients: dict[str, GoodClient], memory: PeakMemory, options: argparse.Namespace
) -> Outcome:
    """Measures one turn of an attack, or of none."""
    scene.wait_until_quiet()
    outcome = Outcome()
    at_first = memory.reset()
    with contextlib.nullcontext() if attack is None else scene.attack(attack.name, options.only) as process:
        time.sleep(_SETTLE_S)
        outcome.during, outcome.errors = _call(clients, options.seconds)
        if process is not None and process.poll() is not None:
            outcome.remark = f"the attack ended by itself with {process.returncode}"
    if scene.server.process.poll() is not None:
        sys.exit(f"the server ended with {scene.server.process.returncode}:\n{scene.server.stderr()[-4000:]}")
    _, errors_at_once = _call(clients, _PAUSE_S)  # which also keeps caches warm: after a pause, first calls are slow
    outcome.after, errors = _call(clients, _AFTER_S)
    for door in clients:
        outcome.errors[door] += [f"after the attack: {message}" for message in errors_at_once[door] + errors[door]]
    outcome.grown_bytes = memory.nbytes - at_first
    outcome.kept_bytes = memory.reset() - at_first
    return outcome


@contextlib.contextmanager
def _good_clients(scene: Scene, doors: list[str]) -> Iterator[dict[str, GoodClient]]:
    with contextlib.ExitStack() as stack:
        yield {door: stack.enter_context(scene.good_client(door)) for door in doors}


def _call(clients: dict[str, GoodClient], seconds: float) -> tuple[Latencies, dict[str, list[str]]]:
    """Makes all clients call for this long at once; returns latencies and errors by door."""
    for client in clients.values():
        client.begin(seconds)
    measured = {door: client.finish() for door, client in clients.items()}
    latencies = {door: each["latencies"] for door, each in measured.items()}
    return latencies, {door: each["errors"] for door, each in measured.items()}


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
