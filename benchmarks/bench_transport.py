"""Compares round trips of bngrad with plain protobuf, a bare gRPC echo, Arrow Flight and the kernel in process.

Every server is a separate process. All that compute use the same kernel on the same number of threads or the same GPU,
and their answers are compared bit for bit. Contestants take turns. A request sends y_backprop and x, and gets
x_backprop.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from benchmarks.kernels import report
from benchmarks.transport import Prepare, inputs, measure, plot, results, targets
from benchmarks.transport.contestants import CONTESTANTS, EMPTY, NETWORKS, TLS, TRITON, connected
from benchmarks.transport.kernel import Kernel
from benchmarks.transport.results import Cell, Rate, Results

_SIZES = ("4KB", "100KB", "512KB", "1MB", "8MB", "25MB", "32MB", "64MB", "100MB", "256MB")
_PACKAGES = ("grpcio", "protobuf", "pyarrow", "numpy", "numba")


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # So that with blocks end the servers.
    start = time.monotonic()
    measured = Results()
    kernel = Kernel(options.threads, options.device)
    with tempfile.TemporaryDirectory() as folder:
        for network in options.networks:
            print(f"\n{NETWORKS[network]}\n{results.header(options.contestants)}", flush=True)
            with connected(options.contestants, network, kernel, Path(folder)) as prepares:
                for nbytes in options.sizes:
                    cells = _latencies(network, nbytes, prepares, kernel, options)
                    print(results.lines(cells), flush=True)
                    measured.cells += cells
                print(results.RATE_HEADER, flush=True)
                for callers in options.callers:
                    rates = _rates(network, callers, prepares, options)
                    print(results.rate_lines(rates), flush=True)
                    measured.rates += rates
    verdicts = targets.verdicts(measured, options.networks)
    print(f"\n{targets.table(verdicts)}\n{time.monotonic() - start:.0f} seconds")
    if options.json:
        machine = report.machine({name: metadata.version(name) for name in _PACKAGES}, options.threads)
        machine["device"] = kernel.description
        document = {"machine": machine, **measured.as_json(), "targets": verdicts}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:  # at last, since the picture is part of the tree whose state the facts name
        plot.draw(measured, options.plot)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_transport", description=__doc__)
    optional = "bngrad", *TLS, *TRITON  # bngrad is the same as bngrad-auto; the others have targets of the Makefile.
    default = [name for name in CONTESTANTS if name not in optional]
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=default)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--sizes", nargs="+", type=inputs.size, default=list(map(inputs.size, _SIZES)))
    parser.add_argument("--callers", nargs="*", type=int, default=[1, 16, 64], help="threads calling at once")
    parser.add_argument("--seconds", type=float, default=0.8, help="of each contestant at each size")
    parser.add_argument("--rounds", type=int, default=5, help="turns in which they are spent")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the kernel")
    parser.add_argument("--device", default="cpu", help="of the kernel: cpu or cuda:N")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="also draw a PNG")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers and the machine's facts")
    return parser.parse_args()


def _latencies(
    network: str, nbytes: int, prepares: Mapping[str, Prepare], kernel: Kernel, options: argparse.Namespace
) -> list[Cell]:
    """Every contestant at one size, each answer checked first."""
    problem = inputs.problem(nbytes)
    expected = kernel.run(problem)
    with contextlib.ExitStack() as stack:
        calls = {}
        for name, prepare in prepares.items():
            is_due = name != EMPTY or nbytes == min(options.sizes)
            if is_due:
                calls[name] = stack.enter_context(prepare(problem))
                measure.check(name, calls[name](), expected)
        times = measure.latencies(calls, options.seconds, options.rounds)
    return [Cell.of(network, nbytes, name, seconds) for name, seconds in times.items()]


def _rates(network: str, callers: int, prepares: Mapping[str, Prepare], options: argparse.Namespace) -> list[Rate]:
    """Every contestant that has a server, called by many threads at once with small tensors."""
    problem = inputs.problem(targets.RATE_NBYTES)
    with contextlib.ExitStack() as stack:
        calls = {
            name: [stack.enter_context(prepare(problem)) for _ in range(callers)]
            for name, prepare in prepares.items()
            if name != EMPTY and CONTESTANTS[name].server
        }
        measured = measure.rates(calls, options.seconds, options.rounds)
    return [Rate(network, callers, name, per_second) for name, per_second in measured.items()]


if __name__ == "__main__":
    main()
