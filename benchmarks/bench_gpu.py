"""GPU kernel time of bngrad against PyTorch's and cuDNN's batch-norm backward, on ResNet-50's layers.

All compute on the same tensors, which are on the device, in the same run. A round is a few calls in a row between two
CUDA events, each on other tensors, enough of them for the second-level cache to hold none of the next; the time is the
median of the rounds' means. Then the second order, small requests in one launch, whole batches from host memory to host
memory, and the same through a server. Writes benchmarks/results/gpu-kernels.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.gpu import rivals, second_order, through_server
from benchmarks.gpu.cases import BATCHES, Case, all_cases, poison, tensors, wrong

from bngrad_kernels.cuda.back_end import CudaBackEnd
from bngrad_kernels.cuda.device import CupyDevice
from bngrad_kernels.cuda.engines import Engine, choose, is_read_from_cache
from bngrad_kernels.cuda.plan import cut
from bngrad_kernels.problem import Problem

RESULTS = Path(__file__).parent / "results" / "gpu-kernels.json"
_ROUNDS = 15
_ROUND_SECONDS = 0.002
_MOST_CALLS = 64
_PEERS = ("pytorch", "cudnn")
_SMALL = Case("NCHW", "float32", 32, (64, 7, 7), True)
_LARGE = Case("NHWC", "bfloat16", 32, (256, 56, 56), True)
_BATCHES = ((_SMALL, 64), (_LARGE, 8))


def main() -> None:
    options = _options()
    device, device_name = CupyDevice(options.ordinal), f"cuda:{options.ordinal}"
    torch.cuda.set_device(options.ordinal)
    device.warm_up()
    copy = _copy_bandwidth()
    print(f"{device.description}; PyTorch {torch.__version__}; a copy moves {copy / 1e12:.2f} TB/s, read and written")
    print(f"{'microseconds, median':44}{'bngrad':>9}{'pytorch':>9}{'cudnn':>9}{'floor':>9}{'GB/s':>7}"
          f"{'of copy':>8}{'/floor':>8}{'/peer':>7}  engine")  # fmt: skip
    rows = []
    for case in all_cases(tuple(options.batches)):
        rows.append(_measure(device, case, copy))
        print(_line(rows[-1]), flush=True)
    print(_summary(rows))
    seconds = [_second_order(device, case, copy) for case in second_order.CASES]
    grouped = [_grouped(device, count) for count in (1, 8, 64)]
    transfers = [_host_to_host(device, case, count) for case, count in _BATCHES]
    served = [row for case, count in _BATCHES for row in through_server.measure(device_name, case, count)]
    document = {
        "device": device.description, "torch": torch.__version__, "copy_bytes_per_second": copy,
        "rows": rows, "second_order": seconds, "grouped": grouped, "host_to_host": transfers,
        "through_server": served,
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_gpu", description=__doc__)
    parser.add_argument("--ordinal", type=int, default=0, help="the number of the GPU")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="PATH")
    return parser.parse_args()


def _measure(device: CupyDevice, case: Case, copy: float) -> dict[str, Any]:
    sets = [tensors(case) for _ in range(sets_of(case))]
    floor = 3 * case.tensor_nbytes / copy
    calls = max(len(sets), min(_MOST_CALLS, math.ceil(_ROUND_SECONDS / floor)))
    launches = math.ceil((_ROUNDS + 1) * calls / len(sets)) + 1
    resident = [rivals.Resident(device, case.spec, [each.by_name()], launches) for each in sets]
    contestants: dict[str, list[Any]] = {
        "bngrad": resident,
        "pytorch": [rivals.pytorch(case, each) for each in sets],
    }
    if rivals.cudnn(case, sets[0]) is not None:
        contestants["cudnn"] = [rivals.cudnn(case, each) for each in sets]
    seconds = {name: time_of(runs, calls) for name, runs in contestants.items()}
    for each, run in zip(sets, resident, strict=True):
        poison(each)
        run()
        complaint = wrong(case, each)
        if complaint:
            raise RuntimeError(f"{case}: {complaint}")
    best = min(seconds[name] for name in _PEERS if name in seconds)
    return {
        "layout": case.layout, "dtype": case.dtype, "batch": case.batch, "chw": case.chw,
        "is_training": case.is_training, "tensor_nbytes": case.tensor_nbytes, "seconds": seconds,
        "floor_seconds": floor, "to_floor": seconds["bngrad"] / floor, "to_best_peer": seconds["bngrad"] / best,
        "case": str(case), "engine": _engine(device, case),
    }  # fmt: skip


def _second_order(device: CupyDevice, case: Case, copy: float) -> dict[str, Any]:
    """The second order, against PyTorch's double backward."""
    sets = [second_order.tensors(case) for _ in range(sets_of(case))]
    floor = 5 * case.tensor_nbytes / copy
    calls = max(len(sets), min(_MOST_CALLS, math.ceil(_ROUND_SECONDS / floor)))
    launches = math.ceil((_ROUNDS + 1) * calls / len(sets)) + 1
    resident = [rivals.Resident(device, second_order.spec_of(case), [each], launches) for each in sets]
    ours = time_of(resident, calls)
    theirs = time_of([second_order.pytorch(case, each) for each in sets], calls)
    for each, run in zip(sets, resident, strict=True):
        second_order.poison(each)
        run()
        complaint = second_order.wrong(case, each)
        if complaint:
            raise RuntimeError(f"second order, {case}: {complaint}")
    print(f"second order, {case}: {1e6 * ours:8.1f} us, {1e6 * theirs:8.1f} us PyTorch, floor {1e6 * floor:8.1f} us, "
          f"{ours / floor:.2f} of it, ratio {ours / theirs:.3f}", flush=True)  # fmt: skip
    return {"case": str(case), "seconds": ours, "pytorch_seconds": theirs, "floor_seconds": floor}


def _engine(device: CupyDevice, case: Case) -> str:
    """The engine, and where a streamed one should find y_backprop and x when it needs them again."""
    planned = cut(case.spec)
    engine = choose(planned, case.spec.channels, device.traits, is_training=case.is_training)
    if engine is not Engine.STREAMED:
        return str(engine.value)
    group_nbytes = 2 * planned.rows * planned.inner * planned.group_channels * case.spec.dtype.itemsize
    is_cached = is_read_from_cache(group_nbytes, device.traits.cache_nbytes)
    return f"{engine.value}, {'cache' if is_cached else 'memory'}"


def sets_of(case: Case) -> int:
    """So many tensors that the second-level cache holds nothing of one when its turn comes."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, math.ceil(3 * cache / (3 * case.tensor_nbytes)) + 1)


def time_of(runs: Sequence[Callable[[], Any]], calls: int) -> float:
    """Seconds a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    seconds: list[float] = []
    position = 0
    for _ in range(_ROUNDS + 1):
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            runs[position % len(runs)]()
            position += 1
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(seconds[1:])  # the first is to warm up


def _copy_bandwidth() -> float:
    """Bytes a second, read and written, of a device-to-device copy."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.nbytes / time_of([lambda: target.copy_(source)], 4)


def _grouped(device: CupyDevice, count: int) -> dict[str, Any]:
    """So many small requests in one launch, against PyTorch's launch by launch."""
    rounds = [[tensors(_SMALL) for _ in range(count)] for _ in range(sets_of(_SMALL) // count + 2)]
    launches = _ROUNDS + 2
    resident = [rivals.Resident(device, _SMALL.spec, [each.by_name() for each in batch], launches) for batch in rounds]
    alone = [[rivals.pytorch(_SMALL, each) for each in batch] for batch in rounds]

    def one_by_one(runs: Sequence[Callable[[], Any]]) -> Callable[[], None]:
        def run() -> None:
            for each in runs:
                each()

        return run

    ours = time_of(resident, len(rounds))
    theirs = time_of([one_by_one(runs) for runs in alone], len(rounds))
    for batch, run in zip(rounds, resident, strict=True):
        for each in batch:
            poison(each)
        run()
        complaint = next(filter(None, (wrong(_SMALL, each) for each in batch)), None)
        if complaint:
            raise RuntimeError(f"{count} grouped: {complaint}")
    print(f"{count:3} requests of {_SMALL}: {1e6 * ours:8.1f} us in one launch, {1e6 * theirs:8.1f} us PyTorch, "
          f"ratio {ours / theirs:.3f}")  # fmt: skip
    return {"requests": count, "case": str(_SMALL), "seconds": ours, "pytorch_seconds": theirs}


def _host_to_host(device: CupyDevice, case: Case, count: int) -> dict[str, Any]:
    """Batches from page-locked host memory and back, as a worker computes them."""
    back_end = CudaBackEnd(device)
    back_end.warm_up()
    spec = case.spec
    memory = np.ones(3 * count * spec.tensor_nbytes, np.uint8)
    back_end.register(memory)
    views = memory.view(spec.dtype).reshape(count, 3, *spec.shape)
    one = np.ones(spec.channels, np.float32)
    batch = [
        Problem(spec, each[0], each[1], one, one, one, each[2], np.empty_like(one), np.empty_like(one))
        for each in views
    ]
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        back_end.run(batch)
        seconds.append(time.perf_counter() - start)
    back_end.unregister(memory)
    median = statistics.median(seconds)
    print(f"{count:3} requests of {case} from host memory and back: {1e3 * median:.2f} ms, "
          f"{memory.nbytes / median / 1e9:.1f} GB/s over the bus")  # fmt: skip
    return {"requests": count, "case": str(case), "seconds": median, "nbytes": memory.nbytes}


def _line(row: dict[str, Any]) -> str:
    cells = "".join(f"{1e6 * row['seconds'][name]:9.1f}" if name in row["seconds"] else f"{'-':>9}"
                    for name in ("bngrad", *_PEERS))  # fmt: skip
    rate = 3 * row["tensor_nbytes"] / row["seconds"]["bngrad"] / 1e9
    return (f"{row['case']:44}{cells}{1e6 * row['floor_seconds']:9.1f}{rate:7.0f}{1 / row['to_floor']:8.0%}"
            f"{row['to_floor']:8.2f}{row['to_best_peer']:7.2f}  {row['engine']}")  # fmt: skip


def _summary(rows: list[dict[str, Any]]) -> str:
    large = [row for row in rows if row["tensor_nbytes"] >= 25e6]
    worst = max(rows, key=lambda row: float(row["to_best_peer"]))
    lines = [
        f"time / better peer: geometric mean {_geometric_mean([row['to_best_peer'] for row in rows]):.3f}, "
        f"worst {worst['to_best_peer']:.2f} ({worst['case']})"
    ]
    if large:
        worst = max(large, key=lambda row: float(row["to_floor"]))
        mean = _geometric_mean([row["to_floor"] for row in large])
        lines.append(f"time / floor from 25 MB on: geometric mean {mean:.2f}, "
                     f"worst {worst['to_floor']:.2f} ({worst['case']})")  # fmt: skip
    return "\n".join(lines)


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    main()
