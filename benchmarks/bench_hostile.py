"""Measures what attacks cost good clients: p99 at every door during an attack and after it, against a quiet server.

The server has several tenants with tokens, TLS on TCP, a small arena, and limits for each client where an attack is
about them. Attackers have the lowest CPU priority: real ones would have their own machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.hostile import good_client
from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.results import (
    Latencies,
    Outcome,
    Windows,
    figures,
    print_head,
    print_row,
    usual,
    verdict,
    write_page,
)
from benchmarks.hostile.scene import ARENA_BYTES, BOUND_BYTES, CLIENT_BYTES, GoodClient, PeakMemory, Scene, serving
from benchmarks.kernels import report

_SETTLE_S = 1.0
_PAUSE_S = 2.0
_AFTER_S = 2.0
_QUIET_EVERY = 6
_PACKAGES = ("grpcio", "hpack", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_hostile", description=__doc__)
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument(
        "--doors", nargs="+", choices=good_client.DOORS, default=good_client.DOORS, help="of good clients"
    )
    parser.add_argument("--only", nargs="+", metavar="DOOR", help="doors to attack, instead of all of each attack")
    parser.add_argument("--seconds", type=float, default=4, help="of each attack that are measured")
    parser.add_argument("--plain", action="store_true", help="no TLS")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers and the machine's facts")
    parser.add_argument("--page", type=Path, metavar="PATH", help="also write the tables of docs/attacks.md")
    options = parser.parse_args()
    attacks = [ATTACKS[name] for name in options.attacks]
    quiet: dict[bool, Windows] = {}
    outcomes: dict[str, Outcome] = {}
    print_head(options.doors)
    for is_limited in (True, False):
        chosen = [attack for attack in attacks if attack.is_limited is is_limited]
        if chosen:
            quiet[is_limited] = {door: [] for door in options.doors}
            _measure(chosen, options, quiet[is_limited], outcomes)
    results = {
        name: figures(outcome, quiet[ATTACKS[name].is_limited]) | {"description": ATTACKS[name].description}
        for name, outcome in outcomes.items()
    }
    print()
    print("\n".join(verdict(results)))
    still = {
        ("with limits" if is_limited else "without limits"): {door: usual(windows) for door, windows in doors.items()}
        for is_limited, doors in quiet.items()
    }
    machine = report.machine({name: metadata.version(name) for name in _PACKAGES}, os.cpu_count() or 0)
    if options.json:
        bound = {"arena_bytes": ARENA_BYTES, "client_bytes": CLIENT_BYTES, "bound_bytes": BOUND_BYTES}
        facts = {"machine": machine, "seconds": options.seconds, "tls": not options.plain, **bound}
        options.json.write_text(json.dumps(facts | {"quiet": still, "attacks": results}, indent=1) + "\n")
    if options.page:
        write_page(options.page, results, still, machine)


def _measure(attacks: list[Attack], options: argparse.Namespace, quiet: Windows, outcomes: dict[str, Outcome]) -> None:
    with (
        serving(tls=not options.plain, is_limited=attacks[0].is_limited) as scene,
        _good_clients(scene, options.doors) as clients,
    ):
        memory = PeakMemory(scene.server.process.pid)
        _call(clients, _SETTLE_S)
        for number, attack in enumerate(attacks):
            scene.wait_until_quiet()
            if number % _QUIET_EVERY == 0:
                for door, latencies in _call(clients, options.seconds)[0].items():
                    quiet[door].append(latencies)
                print_row("quiet", {door: usual(quiet[door]) for door in quiet})
            outcome = outcomes[attack.name] = _attack(attack, scene, clients, memory, options)
            row = figures(outcome, quiet)
            print_row(attack.name, row["doors"], f"{row['grown_bytes'] / 1e6:6.0f} {row['kept_bytes'] / 1e6:6.0f}")
            for remark in (outcome.remark, *(errors[0] for errors in outcome.errors.values() if errors)):
                if remark:
                    print(f"{'':24}{remark[:150]}")
        memory.close()


def _attack(
    attack: Attack, scene: Scene, clients: dict[str, GoodClient], memory: PeakMemory, options: argparse.Namespace
) -> Outcome:
    outcome = Outcome()
    at_first = memory.reset()
    with scene.attack(attack.name, options.only) as process:
        time.sleep(_SETTLE_S)
        outcome.during, outcome.errors = _call(clients, options.seconds)
        if process.poll() is not None:
            outcome.remark = f"the attack ended by itself with {process.returncode}"
    if scene.server.process.poll() is not None:
        sys.exit(f"the server ended with {scene.server.process.returncode}:\n{scene.server.stderr()[-4000:]}")
    time.sleep(_PAUSE_S)
    outcome.after, errors = _call(clients, _AFTER_S)
    for door, messages in errors.items():
        outcome.errors[door] += [f"after the attack: {message}" for message in messages]
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
