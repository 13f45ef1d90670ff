"""Nanoseconds that a cache line takes from one core to another, for all that this process may use.

Some tens mean that the two share a third-level cache, more than a hundred that they do not. A kernel on large tensors
takes longer on cores that share one, and so share the way to memory, too. In a virtual machine a core may be one now
and another one a second later: only this tells.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numba import njit

from bngrad_kernels.cpu.team import read, write
from bngrad_wire.mapped_file import address_of_array

_ROUNDS, _TRIES = 20_000, 5
_LINES_NBYTES = 256


def main() -> None:
    argparse.ArgumentParser(prog="python -m benchmarks.bench_cores", description=__doc__).parse_args()
    cores = sorted(os.sched_getaffinity(0))
    print("ns".rjust(6) + "".join(f"{core:6}" for core in cores))
    for first in cores:
        row = ["" if first == second else f"{distance_ns(first, second):.0f}" for second in cores]
        print(f"{first:6}" + "".join(each.rjust(6) for each in row), flush=True)


def distance_ns(first: int, second: int) -> float:
    """Returns how long a cache line takes from one core to another: the least of some tries."""
    memory = np.zeros(_LINES_NBYTES // 8, np.int64)
    turn = address_of_array(memory) + _LINES_NBYTES // 2
    with _on_core(first):
        _volley(turn, 0, 0, 1)  # compiles it
        return min(_round_ns(turn, second) for _ in range(_TRIES)) / 2


def _round_ns(turn: int, second: int) -> float:
    def answer() -> None:
        with _on_core(second):
            _volley(turn, 1, 0, _ROUNDS + 2)

    thread = threading.Thread(target=answer)
    thread.start()
    _volley(turn, 0, 1, 2)  # the other core is there now
    began = time.perf_counter_ns()
    _volley(turn, 0, 1, _ROUNDS)
    elapsed_ns = time.perf_counter_ns() - began
    thread.join()
    return elapsed_ns / _ROUNDS


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _volley(turn: int, own: int, other: int, rounds: int) -> None:
    """Waits for its turn, and passes it on, again and again."""
    for _ in range(rounds):
        while read(turn) != own:
            pass
        write(turn, np.int64(other))


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Keeps the calling thread on a core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    main()
