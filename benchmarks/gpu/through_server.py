"""Requests to a server whose worker has the GPU, and their answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from benchmarks.gpu.cases import Case
from benchmarks.warm_server import WarmServer

import bngrad

_ROUNDS = 15
_OPTIONS = ("--arena-bytes", "2GiB", "--shared-bytes", "4GiB")  # the arena is page-locked at the start


def measure(device: str, case: Case, callers: int) -> list[dict[str, Any]]:
    """Rounds of one request by each of several callers: arrays in shared memory, and ordinary ones."""
    spec = case.spec
    stats = [np.ones(spec.channels, np.float32)] * 3
    rows = []
    with WarmServer(device=device, options=_OPTIONS) as server, bngrad.Client(server.target) as client:
        options = {"data_format": case.layout, "is_training": spec.is_training}
        kinds: dict[str, Callable[..., Any]] = {"in shared memory": client.empty, "of the client's own": np.empty}
        for kind, empty in kinds.items():
            sets = [[empty(spec.shape, spec.dtype) for _ in range(3)] for _ in range(callers)]
            for y_backprop, x, x_backprop in sets:
                y_backprop[...], x[...], x_backprop[...] = 1, 2, np.nan

            def call(arrays: list[Any]) -> None:
                y_backprop, x, out = arrays
                client.fused_batch_norm_grad_v2(y_backprop, x, *stats, **options, out=out)  # type: ignore[arg-type]

            with ThreadPoolExecutor(callers) as threads:
                seconds = [_time(threads, call, sets) for _ in range(_ROUNDS + 2)][2:]  # the first are to warm up
            if not all(np.isfinite(arrays[2].astype(np.float32)).all() for arrays in sets):
                raise RuntimeError(f"{case}: an answer is missing")
            median = statistics.median(seconds)
            nbytes = 3 * callers * spec.tensor_nbytes
            print(f"{callers:3} requests of {case} through a server, arrays {kind}: {1e3 * median:.2f} ms, "
                  f"{nbytes / median / 1e9:.1f} GB/s", flush=True)  # fmt: skip
            rows.append({"requests": callers, "case": str(case), "arrays": kind, "seconds": median, "nbytes": nbytes})
    return rows


def _time(threads: ThreadPoolExecutor, call: Callable[[list[Any]], None], sets: list[list[Any]]) -> float:
    start = time.perf_counter()
    list(threads.map(call, sets))
    return time.perf_counter() - start
