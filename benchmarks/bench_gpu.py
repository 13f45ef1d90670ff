"""GPU time of bngrad's kernels against PyTorch's and cuDNN's batch-norm backward, on ResNet-50's layers.

All compute on the same tensors in device memory, in the same run. A round is a few consecutive calls between two CUDA
events. Each call uses other tensors, enough of them that the second-level cache holds nothing of the next; the time is
the median of the rounds' means. The GPU starts a round once all its calls are enqueued, so that the host's time, which
exceeds the GPU's for small tensors, does not count. It does count where small requests in one launch are compared with
one launch each. Then follow the second order, whole batches from host memory to host memory, and the same through a
server. Every row is written to the JSON file at once; a case that fails does not affect the others.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from benchmarks.gpu import machine, rivals, second_order
from benchmarks.gpu.cases import BATCHES, Case, all_cases, poison, tensors, wrong
from benchmarks.gpu.timing import ROUNDS, launches_each, sets_of, time_of

from bngrad_kernels.cuda.backend import CudaBackend
from bngrad_kernels.cuda.device import CupyDevice
from bngrad_kernels.problem import Problem

RESULTS = Path(__file__).parent / "results" / "gpu-kernels.json"
PARTS = ("grouped", "layers", "second_order", "host_to_host", "through_server")
_ROUND_SECONDS = 0.002
_MOST_CALLS = 64
_LONGEST_S = 120
"""The limit for a case; most take a second."""
_PEERS = ("pytorch", "cudnn")
_SMALL = Case("NCHW", "float32", 32, (64, 7, 7), True)
_LARGE = Case("NHWC", "bfloat16", 32, (256, 56, 56), True)
_BATCHES = ((_SMALL, 64), (_LARGE, 8))

Row = dict[str, Any]


def main() -> None:
    options = _options()
    if "through_server" in options.parts:
        _through_server()  # fails now if a package is missing, not after the rest has been measured
    device = CupyDevice(options.ordinal)
    torch.cuda.set_device(options.ordinal)
    device.warm_up()
    copy = _copy_bandwidth()
    print(f"{device.description}; PyTorch {torch.__version__}; a copy moves {copy / 1e12:.2f} TB/s, read and written")
    document: dict[str, Any] = {"machine": machine.describe(device, options.commit), "copy_bytes_per_second": copy}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        rows = document[part] = []
        for case, measure in _measurements(part, device, copy, tuple(options.batches)):
            faulthandler.dump_traceback_later(_LONGEST_S, exit=True)  # limits the cost of a kernel that never ends
            rows += _measured(case, measure)
            _write(options.json, document)
            torch.cuda.empty_cache()
        timed = [row for row in rows if "seconds" in row]
        if part == "layers" and timed:
            print(_summary(timed))
    faulthandler.cancel_dump_traceback_later()
    wrong_rows = [row for part in options.parts for row in document[part] if "wrong" in row]
    if wrong_rows:
        sys.exit("WRONG: " + "; ".join(f"{row['case']}: {row['wrong']}" for row in wrong_rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_gpu", description=__doc__)
    parser.add_argument("--ordinal", type=int, default=0, help="the number of the GPU")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--commit", help="which sources these are, where there is no git to say so")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="PATH")
    return parser.parse_args()


def _measurements(
    part: str, device: CupyDevice, copy: float, batches: tuple[int, ...]
) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """Prints what is measured, and how."""
    if part == "layers":
        print(f"{'microseconds, median':44}{'bngrad':>9}{'pytorch':>9}{'cudnn':>9}{'floor':>9}{'GB/s':>7}"
              f"{'of copy':>8}{'/floor':>8}{'/peer':>7}  kernel")  # fmt: skip
        for case in all_cases(batches):
            yield str(case), partial(_layer, device, case, copy)
    elif part == "second_order":
        for case in second_order.CASES:
            yield str(case), partial(_second_order, device, case, copy)
    elif part == "grouped":
        for count in (1, 8, 64):
            yield f"{count} requests", partial(_grouped, device, count)
    elif part == "host_to_host":
        for case, count in _BATCHES:
            yield str(case), partial(_host_to_host, device, case, count)
    else:
        for case, count in _BATCHES:
            yield str(case), partial(_through_server().measure, f"cuda:{device.ordinal}", case, count)


def _measured(case: str, measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a case, or one with the error, so that the other cases are still measured."""
    try:
        return measure()
    except (MemoryError, torch.cuda.OutOfMemoryError) as error:
        print(f"{case}: skipped, as memory is short: {error}", flush=True)
        return [{"case": case, "skipped": f"out of memory: {error}"}]
    except Exception as error:
        traceback.print_exc()
        return [{"case": case, "wrong": f"{type(error).__name__}: {error}"}]


def _through_server() -> ModuleType:
    """Imports the part through a server only on demand, as it needs all of bngrad[server]."""
    from benchmarks.gpu import through_server  # noqa: PLC0415

    import bngrad_cli.commands.serve  # noqa: F401, PLC0415
    from bngrad_server import server  # noqa: F401, PLC0415

    return through_server


def _write(path: Path, document: Row) -> None:
    """Writes the file at once, since this process may be ended at any time."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(document, indent=1) + "\n")
    beside.replace(path)


def _calls(sets: int, floor: float) -> int:
    return max(sets, min(_MOST_CALLS, math.ceil(_ROUND_SECONDS / floor)))


def _complaint(complaints: Iterator[str | None]) -> Row:
    """What is wrong with the first wrong result, if any."""
    first = next(filter(None, complaints), None)
    return {} if first is None else {"wrong": first}


def _layer(device: CupyDevice, case: Case, copy: float) -> list[Row]:
    sets = [tensors(case) for _ in range(sets_of(case))]
    floor = 3 * case.tensor_nbytes / copy
    calls = _calls(len(sets), floor)
    launches = launches_each(len(sets), calls)
    resident = [rivals.Resident(device, case.spec, [each.by_name()], launches) for each in sets]
    contestants: dict[str, list[Any]] = {"bngrad": resident, "pytorch": [rivals.pytorch(case, each) for each in sets]}
    cudnn = rivals.cudnn(case, sets[0])
    if cudnn is not None:
        contestants["cudnn"] = [cudnn, *(rivals.cudnn(case, each) for each in sets[1:])]
    seconds = {name: time_of(runs, calls) for name, runs in contestants.items()}

    def complaint(made: Any, run: Callable[[], Any]) -> str | None:
        poison(made)
        run()
        return wrong(case, made)

    best = min(seconds[name] for name in _PEERS if name in seconds)
    row: Row = {
        "case": str(case), "kernel": resident[0].kind,
        "layout": case.layout, "dtype": case.dtype, "batch": case.batch, "chw": case.chw,
        "is_training": case.is_training, "tensor_nbytes": case.tensor_nbytes, "seconds": seconds,
        "floor_seconds": floor, "to_floor": seconds["bngrad"] / floor, "to_best_peer": seconds["bngrad"] / best,
        **_complaint(map(complaint, sets, resident)),
    }  # fmt: skip
    print(_line(row), flush=True)
    return [row]


def _second_order(device: CupyDevice, case: Case, copy: float) -> list[Row]:
    """The second order, against PyTorch's double backward."""
    sets = [second_order.tensors(case) for _ in range(sets_of(case))]
    floor = 5 * case.tensor_nbytes / copy
    calls = _calls(len(sets), floor)
    launches = launches_each(len(sets), calls)
    resident = [rivals.Resident(device, second_order.spec_of(case), [each], launches) for each in sets]
    ours = time_of(resident, calls)
    theirs = time_of([second_order.pytorch(case, each) for each in sets], calls)

    def complaint(made: second_order.Named, run: Callable[[], Any]) -> str | None:
        second_order.poison(made)
        run()
        return second_order.wrong(case, made)

    print(f"second order, {case}: {1e6 * ours:8.1f} us, {1e6 * theirs:8.1f} us PyTorch, floor {1e6 * floor:8.1f} us, "
          f"{ours / floor:.2f} of it, ratio {ours / theirs:.3f}", flush=True)  # fmt: skip
    return [{"case": str(case), "seconds": ours, "pytorch_seconds": theirs, "floor_seconds": floor,
             **_complaint(map(complaint, sets, resident))}]  # fmt: skip


def _copy_bandwidth() -> float:
    """The bytes per second, read and written, of a device-to-device copy."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.nbytes / time_of([lambda: target.copy_(source)], 4)


def _grouped(device: CupyDevice, count: int) -> list[Row]:
    """Many small requests in one launch, against PyTorch's launch by launch, including the host's time."""
    rounds = [[tensors(_SMALL) for _ in range(count)] for _ in range(sets_of(_SMALL) // count + 2)]
    launches = launches_each(len(rounds), len(rounds))
    resident = [rivals.Resident(device, _SMALL.spec, [each.by_name() for each in batch], launches) for batch in rounds]
    alone = [[rivals.pytorch(_SMALL, each) for each in batch] for batch in rounds]

    def one_by_one(runs: Sequence[Callable[[], Any]]) -> Callable[[], None]:
        def run() -> None:
            for each in runs:
                each()

        return run

    ours = time_of(resident, len(rounds), has_head_start=False)
    theirs = time_of([one_by_one(runs) for runs in alone], len(rounds), has_head_start=False)

    def complaint(batch: Sequence[Any], run: Callable[[], Any]) -> str | None:
        for each in batch:
            poison(each)
        run()
        return next(filter(None, (wrong(_SMALL, each) for each in batch)), None)

    print(f"{count:3} requests of {_SMALL}: {1e6 * ours:8.1f} us in one launch, {1e6 * theirs:8.1f} us PyTorch, "
          f"ratio {ours / theirs:.3f}", flush=True)  # fmt: skip
    return [{"requests": count, "case": str(_SMALL), "seconds": ours, "pytorch_seconds": theirs,
             **_complaint(map(complaint, rounds, resident))}]  # fmt: skip


def _host_to_host(device: CupyDevice, case: Case, count: int) -> list[Row]:
    """Batches from page-locked host memory and back, as a worker computes them."""
    backend = CudaBackend(device)
    backend.warm_up()
    spec = case.spec
    memory = np.ones(3 * count * spec.tensor_nbytes, np.uint8)
    backend.register(memory)
    views = memory.view(spec.dtype).reshape(count, 3, *spec.shape)
    one = np.ones(spec.channels, np.float32)
    batch = [
        Problem(spec, each[0], each[1], one, one, one, each[2], np.empty_like(one), np.empty_like(one))
        for each in views
    ]
    seconds = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        backend.run(batch)
        seconds.append(time.perf_counter() - start)
    backend.unregister(memory)
    median = statistics.median(seconds[1:])  # the first is to warm up
    theirs = statistics.median(rivals.pytorch_host_to_host(case, count, 1 + ROUNDS)[1:])
    print(f"{count:3} requests of {case} from host memory and back: {1e3 * median:.2f} ms, "
          f"{memory.nbytes / median / 1e9:.1f} GB/s over the bus; {1e3 * theirs:.2f} ms PyTorch, "
          f"ratio {median / theirs:.3f}", flush=True)  # fmt: skip
    return [{"requests": count, "case": str(case), "seconds": median, "nbytes": memory.nbytes,
             "pytorch_seconds": theirs}]  # fmt: skip


def _line(row: Row) -> str:
    cells = "".join(f"{1e6 * row['seconds'][name]:9.1f}" if name in row["seconds"] else f"{'-':>9}"
                    for name in ("bngrad", *_PEERS))  # fmt: skip
    rate = 3 * row["tensor_nbytes"] / row["seconds"]["bngrad"] / 1e9
    return (f"{row['case']:44}{cells}{1e6 * row['floor_seconds']:9.1f}{rate:7.0f}{1 / row['to_floor']:8.0%}"
            f"{row['to_floor']:8.2f}{row['to_best_peer']:7.2f}  {row['kernel']} {row.get('wrong', '')}")  # fmt: skip


def _summary(rows: list[Row]) -> str:
    large = [row for row in rows if row["tensor_nbytes"] >= 25e6]
    worst = max(rows, key=lambda row: float(row["to_best_peer"]))
    lines = [
        f"time / better peer: geometric mean {statistics.geometric_mean(row['to_best_peer'] for row in rows):.3f}, "
        f"worst {worst['to_best_peer']:.2f} ({worst['case']})"
    ]
    if large:
        worst = max(large, key=lambda row: float(row["to_floor"]))
        mean = statistics.geometric_mean(row["to_floor"] for row in large)
        lines.append(f"time / floor from 25 MB on: geometric mean {mean:.2f}, "
                     f"worst {worst['to_floor']:.2f} ({worst['case']})")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
