"""``python -m benchmarks.gpu.sweep``: other values of the constants of plan and kernel_selection on this GPU.

One constant at a time takes other values while all others stay as they are. Times are in microseconds, medians, over
tensors that the second-level cache does not hold. Those of plan.py decide the bits: change them between releases only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.gpu.cases import Case, tensors
from benchmarks.gpu.rivals import Resident
from benchmarks.gpu.timing import launches_each, sets_of, time_of

from bngrad_kernels.cuda import descriptors, kernel_selection, plan
from bngrad_kernels.cuda.device import CupyDevice

_MB = 1 << 20
CASES = [
    Case("NHWC", "bfloat16", 32, (64, 112, 112), True), Case("NHWC", "bfloat16", 32, (256, 56, 56), True),
    Case("NHWC", "bfloat16", 256, (128, 28, 28), True), Case("NHWC", "bfloat16", 32, (1024, 14, 14), True),
    Case("NHWC", "float32", 32, (512, 28, 28), True), Case("NCHW", "bfloat16", 32, (64, 112, 112), True),
    Case("NCHW", "bfloat16", 32, (512, 28, 28), True), Case("NCHW", "bfloat16", 256, (2048, 7, 7), True),
    Case("NHWC", "bfloat16", 32, (256, 56, 56), False),
]  # fmt: skip
CONSTANTS: list[tuple[Any, str, list[int]]] = [
    (plan, "_LONGEST_TILE", [8, 12, 16, 24, 32]),
    (plan, "_SHORTEST_TILE", [2, 4, 8]),
    (plan, "_BLOCKS", [1, 132, 264, 528]),
    (plan, "_RUN_NBYTES", [64, 128, 256, 512]),
    (plan, "_WORTHWHILE_NBYTES", [8 << 10, 32 << 10, 64 << 10]),
    (kernel_selection, "_SHORT_ROW_NBYTES", [0, 512]),
    (kernel_selection, "_MOST_AHEAD_NBYTES", [4 * _MB, 8 * _MB, 16 * _MB, 24 * _MB]),
    (kernel_selection, "_LEAST_AHEAD_SHARE", [8, 16, 32, 64]),
    (kernel_selection, "_SMALL_NBYTES", [0, 32 << 10, 64 << 10, 100 << 10]),
]


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.gpu.sweep", description=__doc__).parse_args()
    device = CupyDevice(torch.cuda.current_device())
    device.warm_up()
    print(device.description)
    for number, case in enumerate(CASES):
        print(f"case {number}: {case}")
    print(f"{'':36}" + "".join(f"{number:9}" for number in range(len(CASES))))
    for blocks in (1, 2, 3):
        device.blocks = blocks * device.traits.processors
        _row(device, f"blocks a processor = {blocks}")
    device.blocks = 2 * device.traits.processors
    traits = device.traits
    device.traits = traits._replace(shared_nbytes=0)
    _row(device, "nothing resident")
    device.traits = traits
    for module, name, values in CONSTANTS:
        for value in values:
            mark = "*" if getattr(module, name) == value else " "
            with _set(module, name, value):
                _row(device, f"{mark}{name} = {value}")


@contextmanager
def _set(module: Any, name: str, value: int) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    _forget()
    try:
        yield
    finally:
        setattr(module, name, before)
        _forget()


def _forget() -> None:
    plan._cut.cache_clear()
    descriptors.template.cache_clear()


def _row(device: CupyDevice, title: str) -> None:
    cells = []
    for case in CASES:
        sets = [tensors(case) for _ in range(sets_of(case))]
        calls = max(len(sets), 8)
        launches = launches_each(len(sets), calls)
        resident = [Resident(device, case.spec, [each.by_name()], launches) for each in sets]
        cells.append(f"{1e6 * time_of(resident, calls):9.1f}")
    print(f"{title:36}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
