"""Throughput of two servers on a Ray cluster on this machine, each pinned to a core, against each of them alone.

Calls are the second order of tensors in memory that their client shares with the server, so that nearly all of their
time is the kernel's. Needs Ray, two cores and nothing else that uses them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import psutil
import ray

import bngrad
import bngrad.ray

OPTIONS = ("--insecure", "--workers", "1")
CALLERS = 2
"""The threads that call each server: one's request is computed while the other's comes and goes."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_ray", description=__doc__)
    parser.add_argument("--shape", type=int, nargs=4, default=(32, 56, 56, 64), metavar=("N", "H", "W", "C"))
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(bngrad.ray.start(2, {"CPU": 1}, options=OPTIONS))
        loads = []
        for core, state in enumerate(fleet.states()):
            client = stack.enter_context(bngrad.Client(state.target))
            loads.append([_caller(client, tuple(options.shape), np.dtype(options.dtype)) for _ in range(CALLERS)])
            _throughput(loads[-1], 1.0)
            _pin(state.pid, core)  # with the threads that the first calls have started
        ratios = []
        for _ in range(options.rounds):
            alone = [_throughput(load, options.seconds) for load in loads]
            both = _throughput(loads[0] + loads[1], options.seconds)
            ratios.append(both / statistics.mean(alone))
            print(
                f"{alone[0]:.1f} and {alone[1]:.1f} calls/s alone, {both:.1f} together: {ratios[-1]:.2f} x", flush=True
            )
        print(f"median {statistics.median(ratios):.2f} x")


def _pin(pid: int, core: int) -> None:
    """Binds every thread of a server and its workers to a core."""
    server = psutil.Process(pid)
    for process in (server, *server.children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def _caller(client: bngrad.Client, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Callable[[], object]:
    g, dy, x, *out = (client.empty(shape, dtype) for _ in range(5))
    rng = np.random.default_rng(0)
    for tensor in (g, dy, x):
        tensor[...] = rng.standard_normal(shape, np.float32)
    ones = np.ones(shape[-1], np.float32)
    call = client.fused_batch_norm_grad_grad
    return functools.partial(call, g, ones, ones, dy, x, ones, ones, ones, out=(out[0], out[1]))


def _throughput(callers: Sequence[Callable[[], object]], seconds: float) -> float:
    """Returns how many calls per second end if each caller makes one after the other."""
    begin = time.monotonic()
    counts = [0] * len(callers)

    def run(number: int) -> None:
        while time.monotonic() < begin + seconds:
            callers[number]()
            counts[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(callers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - begin)


if __name__ == "__main__":
    main()
