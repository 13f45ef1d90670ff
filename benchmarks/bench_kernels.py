"""CPU kernel time of bngrad against TensorFlow, PyTorch and oneDNN, on the batch-norm layers of ResNet-50.

All rivals compute the same numbers with the same number of threads, in turns, each in its own process. The caches are
as warm as the tensors' size allows: a turn is one untimed call followed by timed ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from benchmarks.kernels import cases, report
from benchmarks.kernels.cases import Case
from benchmarks.kernels.report import Row
from benchmarks.kernels.rivals import BNGRAD, COPY, Rival, Turn, shared_tensors
from benchmarks.peers import PEERS

_TURN_SECONDS = 0.02


def main() -> None:
    options = _options()
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=in_memory)))
        tensors = directory / "tensors"
        chosen = [Case(layout, dtype, chw, not options.inference)
                  for layout in options.layout for dtype in options.dtype for chw in options.shapes]  # fmt: skip
        with tensors.open("wb") as file:
            file.truncate(3 * max(case.spec.tensor_nbytes for case in chosen))
        rivals, versions = _start(options, tensors, stack)
        names = [rival.name for rival in rivals]
        print(report.header(names), flush=True)
        rows = []
        for case in chosen:
            rows.append(_measure(case, rivals, tensors, options.rounds))
            print(report.line(rows[-1], names, options.threads), flush=True)
        print(report.summary(rows, names, options.threads))
        print(f"{time.monotonic() - start:.0f} seconds")
    if options.json:
        document = {"machine": report.machine(versions, options.threads), "rows": [row.as_json() for row in rows]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_kernels", description=__doc__)
    parser.add_argument("--layout", nargs="+", choices=cases.LAYOUTS, default=cases.LAYOUTS)
    parser.add_argument("--dtype", nargs="+", choices=list(cases.DTYPES), default=list(cases.DTYPES))
    parser.add_argument("--shapes", nargs="+", type=_shape, default=cases.RESNET50, metavar="CxHxW")
    parser.add_argument("--inference", action="store_true", help="is_training=False")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each rival at each case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--without-bngrad", action="store_true")
    parser.add_argument("--second-libdnnl", type=Path, metavar="PATH", help="another oneDNN, to be a rival too")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers and the machine's facts")
    return parser.parse_args()


def _shape(text: str) -> tuple[int, int, int]:
    channels, height, width = map(int, text.split("x"))
    return channels, height, width


def _start(
    options: argparse.Namespace, tensors: Path, stack: contextlib.ExitStack
) -> tuple[list[Rival], dict[str, str]]:
    """Starts every rival that is installed."""
    names = [COPY, *options.peers] if options.without_bngrad else [COPY, BNGRAD, *options.peers]
    started = Rival.start_all(names, options.threads, tensors, options.second_libdnnl)
    for rival in started:
        stack.callback(rival.end)
    rivals, versions = [], {}
    for rival in started:
        present, text = rival.greeting()
        print(f"{rival.name:>14}  {text if present else f'left out: {text}'}", file=sys.stderr)
        if present:
            rivals.append(rival)
            versions[rival.name] = text
    return rivals, versions


def _measure(case: Case, rivals: list[Rival], tensors: Path, rounds: int) -> Row:
    turns: dict[str, list[Turn]] = {rival.name: [] for rival in _prepared(case, rivals, tensors)}
    able = [rival for rival in rivals if rival.name in turns]
    for number in range(rounds):
        for rival in able[number % len(able) :] + able[: number % len(able)]:
            turns[rival.name].append(rival.turn(_TURN_SECONDS))
    row = Row(case, {}, {}, {}, {})
    for name, its_turns in turns.items():
        seconds = sorted(second for turn in its_turns for second in turn.seconds)
        median = statistics.median(seconds)
        row.milliseconds[name] = 1e3 * median
        row.turns[name] = [1e3 * statistics.median(turn.seconds) for turn in its_turns]
        row.cores[name] = sum(turn.cpu_seconds for turn in its_turns) / sum(seconds)
        row.spread[name] = float(np.subtract(*np.percentile(seconds, (75, 25)))) / 2 / median
    return row


def _prepared(case: Case, rivals: list[Rival], tensors: Path) -> Iterator[Rival]:
    """The rivals that compute a case, each answer checked. Raises RuntimeError where one is wrong."""
    spec = case.spec
    dy, x, x_backprop = shared_tensors(tensors, spec)
    cases.fill(spec, dy, x)
    made = cases.problem(spec, dy, x)
    for rival in rivals:
        reason = rival.prepare(case)
        if reason is not None:
            continue
        complaint = None if rival.name == COPY else cases.wrong(made, (x_backprop, *rival.vectors()))
        if complaint:
            raise RuntimeError(f"{rival.name} at {case}: {complaint}")
        yield rival


if __name__ == "__main__":
    main()
