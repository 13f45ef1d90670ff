"""Says by a model how fleets of servers do under churn, with ten clients each, and checks it against a real fleet."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.fleet import plot, real, report
from benchmarks.fleet.balancing import BALANCINGS
from benchmarks.fleet.model import Model, Outcome, Scenario
from benchmarks.fleet.real import Times

from bngrad_kernels.machine import processor

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/fleet-model.json"
PLOT = ROOT / "docs/fleet-model.png"
PAGE = ROOT / "docs/fleet-model.md"
SIZES = {4: (48.0, 12.0), 64: (20.0, 10.0), 1000: (10.0, 6.0)}
"""The seconds that are simulated for each number of servers, and how many at the beginning do not count."""
CLIENTS_PER_SERVER = 10
LOAD = 0.8
IMAGES = 25
"""How many times the measured requests' images those of the model have."""
LIFETIME_S = 60.0
FLEETS = {"equal servers": (1.0,), "half of them three times slower": (1.0, 1 / 3)}
CHECK_S = 18.0, 4.0
CHECKS = {"equal servers": (1, 1, 1, 1), "half of them three times slower": (1, 1, 3, 3)}
CHECKED = {"weighted": True, "fewest in flight": False}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_fleet", description=__doc__)
    parser.add_argument(
        "--measure", action="store_true", help="measure requests and a real fleet anew, for two minutes"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="for the model")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.measure:
        results |= {
            "processor": f"{os.cpu_count()} cores of {processor()}",
            "times": dataclasses.asdict(real.mix_times()),
            "check": _check(),
        }
    else:
        times = Times(**results["times"])
        results["scenarios"] = _scenarios(
            Times([IMAGES * each for each in times.service_s], times.overhead_s), options.processes
        )
        plot.draw(results, PLOT)
        report.write(results, PAGE)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def _check() -> list[dict[str, Any]]:
    """Runs four real servers, and the model with the times of theirs."""
    rows = []
    for name, slowness in CHECKS.items():
        with real.fleet(slowness) as targets:
            times = real.device_times(targets[0])
            speeds = [1 / each for each in slowness]
            rate = LOAD * sum(speeds) / (sum(times.service_s) / len(times.service_s))
            clients = CLIENTS_PER_SERVER * len(targets)
            for balancing, reports in CHECKED.items():
                measured = real.run(
                    targets,
                    clients=clients,
                    rate=rate,
                    seconds=CHECK_S[0],
                    warm_up_s=CHECK_S[1],
                    reports=reports,
                )
                outcome = _simulate(speeds, balancing, times, seconds=CHECK_S[0], warm_up_s=CHECK_S[1])
                _print(f"real, {name}, {balancing}", measured)
                _print("  the model", outcome)
                rows.append(
                    {
                        "fleet": name,
                        "balancing": balancing,
                        "real": dataclasses.asdict(measured),
                        "model": dataclasses.asdict(outcome),
                    }
                )
    return rows


def _scenarios(times: Times, processes: int) -> list[dict[str, Any]]:
    cases = [(fleet, size, balancing) for fleet in FLEETS for size in SIZES for balancing in BALANCINGS]
    with ProcessPoolExecutor(processes) as pool:
        outcomes = [pool.submit(_scenario, *case, times) for case in cases]
        rows = []
        for (fleet, size, balancing), future in zip(cases, outcomes, strict=True):
            outcome = future.result()
            _print(f"{size} servers, {fleet}, {balancing}", outcome)
            rows.append({"fleet": fleet, "servers": size, "balancing": balancing, **dataclasses.asdict(outcome)})
    return rows


def _scenario(fleet: str, size: int, balancing: str, times: Times) -> Outcome:
    pattern, (seconds, warm_up_s) = FLEETS[fleet], SIZES[size]
    speeds = [pattern[number % len(pattern)] for number in range(size)]
    return _simulate(speeds, balancing, times, seconds=seconds, warm_up_s=warm_up_s, lifetime_s=LIFETIME_S)


def _simulate(
    speeds: Sequence[float],
    balancing: str,
    times: Times,
    *,
    seconds: float,
    warm_up_s: float,
    lifetime_s: float = math.inf,
) -> Outcome:
    scenario = Scenario(
        speeds,
        CLIENTS_PER_SERVER * len(speeds),
        LOAD,
        times.service_s,
        times.overhead_s,
        balancing,
        seconds,
        warm_up_s,
        lifetime_s=lifetime_s,
    )
    return Model(scenario).run()


def _print(what: str, outcome: Any) -> None:
    print(
        f"{what}: goodput {outcome.goodput:.3f}, p50 {outcome.p50_s * 1e3:.0f} ms, p99 {outcome.p99_s * 1e3:.0f} ms"
        + (f", imbalance {outcome.imbalance:.2f}" if isinstance(outcome, Outcome) else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
