"""Measures GPU time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.gpu.cases import Case

ROUNDS = 15
_WARM_UPS = 2
_MOST_HEAD_START_S = 0.05
_CYCLES_PER_SECOND = 2e9


def sets_of(case: Case) -> int:
    """The number of sets of tensors at which the second-level cache holds nothing of a set when its turn comes."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, math.ceil(cache / case.tensor_nbytes) + 1)


def time_of(runs: Sequence[Callable[[], Any]], calls: int, *, has_head_start: bool = True) -> float:
    """Seconds a call, by CUDA events around some calls in a row: the median of the rounds; the runs take turns.

    With a head start, the GPU waits until the round has been asked for, so that only its own time counts and not the
    host's, which is longer for small tensors.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    seconds: list[float] = []
    position = 0
    head_start = 0.0
    for _ in range(_WARM_UPS + ROUNDS):
        torch.cuda.synchronize()
        if has_head_start:
            torch.cuda._sleep(int(head_start * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        start.record()
        asked = time.perf_counter()
        for _ in range(calls):
            runs[position % len(runs)]()
            position += 1
        end.record()
        head_start = min(2 * (time.perf_counter() - asked), _MOST_HEAD_START_S)
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(seconds[_WARM_UPS:])


def launches_each(runs: int, calls: int) -> int:
    """The maximum number of times that `time_of` calls each run, plus one to check the result."""
    return math.ceil((_WARM_UPS + ROUNDS) * calls / runs) + 1
