"""Measures a server under load: goodput and latency below and far above saturation, a storm, killed workers, batching.

Separate processes send requests at the random times of a Poisson process, independent of earlier answers. Latency
counts from the time at which a request was due. Answers are compared bit for bit. With several cores, server and
generator get separate ones, so that a heavier load does not slow the server.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.kernels import report as kernel_report
from benchmarks.load import fleet, measure, mix, plot, report, server, targets
from benchmarks.load.fleet import Fleet, Run
from benchmarks.load.generator import LEAN, Setup
from benchmarks.load.measure import Step
from benchmarks.load.mix import Item
from benchmarks.load.progress import Progress
from benchmarks.load.results import Kills, Results, Storm
from benchmarks.load.server import Server

_PARTS = ("sweep", "storm", "kills", "batching")
_MULTIPLES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0)
_STORM_MULTIPLE = 3.0
_SATURATION_CALLERS, _KILLS_CALLERS, _BATCHING_CALLERS = 16, 32, 64
_KILL_EVERY_S = 2.0
_KILL_TURNS, _BATCHING_TURNS = 2, 5
_LONG_TIMEOUT_S = 60.0
_PROBES = 15
_PACKAGES = ("grpcio", "protobuf", "numpy", "numba")


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that with blocks end the servers.
    results = Results(options.timeout)
    progress = Progress()
    start = time.monotonic()
    try:
        if {"sweep", "storm"} & set(options.parts):
            _load(options, results, progress)
        if "kills" in options.parts:
            _kills(options, results, progress)
        if "batching" in options.parts:
            _batching(options, results, progress)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
    except (fleet.FleetError, server.ServerStartError) as error:
        sys.exit(f"\n{error}")
    _conclude(options, results)
    print(f"\n{time.monotonic() - start:.0f} seconds")


def _options() -> argparse.Namespace:
    cores = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_load", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--seconds", type=float, default=4, help="of each turn of a load")
    parser.add_argument("--turns", type=int, default=3, help="of the sweep's loads; the middle one counts")
    parser.add_argument("--storm-seconds", type=float, default=60)
    parser.add_argument("--multiples", nargs="+", type=float, default=list(_MULTIPLES), help="of the saturation")
    parser.add_argument("--timeout", type=float, default=2, help="seconds from when a request is due to its answer")
    parser.add_argument("--callers", type=int, default=448, help="the most requests in flight in an open loop")
    parser.add_argument("--kill-requests", type=int, default=20_000, help="of each turn of the kills")
    parser.add_argument(
        "--transport", choices=[LEAN, "auto", "shared", "stream", "unary"], default=LEAN,
        help="lean: the same calls as bngrad.Client on the server's host, in one thread and without its conveniences, "
        "so that the generator keeps up; others: bngrad.Client itself, in a thread for each caller",
    )  # fmt: skip
    parser.add_argument("--server", metavar="TARGET", help="a running server, for the sweep and the storm")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="further options of bngrad serve")
    parser.add_argument("--server-cores", type=int, default=max(1, len(cores) // 2), help="the generator has the rest")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers and the machine's facts")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="also draw a PNG")
    parser.add_argument("--page", type=Path, metavar="PATH", help="also write the tables between the marks of a page")
    options = parser.parse_args()
    options.all_cores = tuple(cores)
    options.own_cores = tuple(cores[: options.server_cores])
    options.other_cores = tuple(cores[options.server_cores :]) or tuple(cores)
    options.serve = tuple(shlex.split(options.serve))
    return options


def _load(options: argparse.Namespace, results: Results, progress: Progress) -> None:
    """Measures saturation, the loads around it, and the storm."""
    with contextlib.ExitStack() as stack:
        if options.server:
            served = Server(options.server, None)
        else:
            served = stack.enter_context(server.running(options.own_cores, options.serve))
        callers = stack.enter_context(
            _fleet(options, served, mix.MIXED, progress, max(options.callers, _SATURATION_CALLERS))
        )
        results.memory = stack.enter_context(server.watched(served)) if served.front else None
        quiet = _probes(callers, options)
        print(f"Mixed requests of {mix.mean_nbytes(mix.MIXED) / 1e6:.1f} MB\n{report.header()}", flush=True)

        def offer(rate: float, multiple: float, seconds: float, title: str) -> Step:
            return _measured(
                title, multiple, served, callers, progress, seconds,
                lambda: callers.open_loop(rate, seconds, options.callers, options.timeout),
            )  # fmt: skip

        def saturate() -> Step:
            return _measured(
                f"{_SATURATION_CALLERS} callers", None, served, callers, progress, options.seconds,
                lambda: callers.closed_loop(_SATURATION_CALLERS, options.timeout, seconds=options.seconds),
            )  # fmt: skip

        # The first load touches memory for the first time, which measures the system rather than the server.
        most = saturate().goodput
        offer(_STORM_MULTIPLE * most, _STORM_MULTIPLE, options.seconds, "warm-up")
        for _ in range(options.turns if "sweep" in options.parts else 1):
            time.sleep(options.timeout)  # Requests that have timed out must not meet the next load.
            results.saturation.append(saturate())
            most = measure.middle(results.saturation).goodput
            for multiple in options.multiples if "sweep" in options.parts else ():
                results.turns.append(offer(multiple * most, multiple, options.seconds, f"{multiple:g} x"))
                time.sleep(options.timeout)
        if "storm" in options.parts:
            start = time.monotonic()
            rate, title = _STORM_MULTIPLE * most, f"{_STORM_MULTIPLE:g} x, storm"
            storm = offer(rate, _STORM_MULTIPLE, options.storm_seconds, title)
            results.storm = Storm(storm, start, quiet, _probes(callers, options))


def _kills(options: argparse.Namespace, results: Results, progress: Progress) -> None:
    """Sends the same requests with and without kills, in turns; the server has all cores, and a worker on each."""
    kills = results.kills = Kills()
    with (
        server.running(options.all_cores, options.serve) as served,
        _fleet(options, served, mix.MIXED, progress, _KILLS_CALLERS, cores=options.all_cores) as callers,
    ):
        print(f"\n{_KILLS_CALLERS} callers, and a worker killed every {_KILL_EVERY_S:g} s\n{report.header()}")

        def turn(title: str) -> Step:
            return _measured(
                title, None, served, callers, progress, 0,
                lambda: callers.closed_loop(_KILLS_CALLERS, _LONG_TIMEOUT_S, count=options.kill_requests),
            )  # fmt: skip

        for _ in range(_KILL_TURNS):
            kills.undisturbed.append(turn("undisturbed"))
            with server.robbed(served, _KILL_EVERY_S) as killed:
                kills.disturbed.append(turn("workers killed"))
            kills.killed += len(killed)
            served.wait_until_ready()


def _batching(options: argparse.Namespace, results: Results, progress: Progress) -> None:
    """Sends tiny requests to two servers in turns: one with usual batches, one with a request in each."""
    serve = (*options.serve, "--front-bytes", "0")  # else there are no batches
    variants = {targets.BATCHED: serve, targets.ALONE: (*serve, "--max-batch-jobs", "1")}
    with contextlib.ExitStack() as stack:
        pairs = {}
        for name, arguments in variants.items():
            served = stack.enter_context(server.running(options.own_cores, arguments))
            pairs[name] = (
                served,
                stack.enter_context(_fleet(options, served, mix.TINY, progress, _BATCHING_CALLERS, processes=2)),
            )
        print(f"\n{_BATCHING_CALLERS} callers, tensors of 4 KB\n{report.header()}")
        seconds = options.seconds
        results.batching = {name: [] for name in variants}
        for _, (name, (served, callers)) in itertools.product(range(_BATCHING_TURNS), pairs.items()):
            step = _measured(
                name, None, served, callers, progress, seconds,
                lambda callers=callers: callers.closed_loop(_BATCHING_CALLERS, _LONG_TIMEOUT_S, seconds=seconds),  # type: ignore[misc]
            )  # fmt: skip
            results.batching[name].append(step)


@contextlib.contextmanager
def _fleet(
    options: argparse.Namespace,
    served: Server,
    items: tuple[Item, ...],
    progress: Progress,
    callers: int,
    *,
    cores: tuple[int, ...] | None = None,
    processes: int | None = None,
) -> Iterator[Fleet]:
    cores = cores or options.other_cores
    setup = Setup(served.target, options.transport, items, callers, cores)
    with progress.of("starting"), fleet.running(processes or len(cores), setup, progress.show) as running:
        yield running


def _measured(
    title: str,
    multiple: float | None,
    served: Server,
    callers: Fleet,
    progress: Progress,
    seconds: float,
    load: Callable[[], Run],
) -> Step:
    """Runs a load and prints its line of the table."""
    sizes, cpu, start = served.batch_sizes(), served.cpu_seconds(), time.monotonic()
    with progress.of(title, seconds):
        run = load()
    took = time.monotonic() - start
    server_cores = (served.cpu_seconds() - cpu) / took if served.front else None
    now = served.batch_sizes()
    batches = None if now is None or sizes is None else [
        new - old for new, old in itertools.zip_longest(now, sizes, fillvalue=0)
    ]  # fmt: skip
    step = measure.step(
        title, multiple, run, callers.setup.items,
        server_cores=server_cores, generator_cores=run.outcome.cpu_seconds / took, batch_sizes=batches,
    )  # fmt: skip
    print(report.row(step), flush=True)
    for error in dict.fromkeys(step.errors):
        print(f"  {error}", flush=True)
    return step


def _probes(callers: Fleet, options: argparse.Namespace) -> list[float]:
    """Times single requests with pauses between them, in milliseconds."""
    milliseconds = []
    for _ in range(_PROBES):
        milliseconds.append(1e3 * callers.probe(_LONG_TIMEOUT_S))
        time.sleep(0.1)
    return milliseconds


def _conclude(options: argparse.Namespace, results: Results) -> None:
    verdicts = targets.verdicts(results)
    print(f"\n{report.summary(results, verdicts)}")
    machine = kernel_report.machine({name: metadata.version(name) for name in _PACKAGES}, len(options.own_cores))
    note = (
        f"{machine['cpu']}, Linux {machine['kernel']}, Python {machine['python']}, commit {machine['commit']}; "
        f"{len(options.own_cores)} core for the server, {len(options.other_cores)} for the generator; "
        f"transport {options.transport!r}; timeout {options.timeout:g} s."
    )
    if options.json:
        document: dict[str, Any] = {
            "machine": machine,
            "options": {name: str(value) for name, value in vars(options).items()},
            "mix": [{"item": str(item), "count": item.count, "nbytes": item.nbytes} for item in mix.MIXED],
            **results.as_json(),
            "targets": [dataclasses.asdict(verdict) for verdict in verdicts],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document) + "\n")
    if options.plot and results.steps:
        plot.draw(results, options.plot, note)
    if options.page:
        report.write_into(options.page, results, verdicts, note)


if __name__ == "__main__":
    main()
