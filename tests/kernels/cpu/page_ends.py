"""Computes problems whose arrays lie between pages that may not be touched: ``python -m tests.kernels.cpu.page_ends``.

What reads or writes beyond an array ends the process. The last line that it printed names the problem.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap

import numpy as np
from tests.kernels.problems import DTYPES, MODES, ORDERS, random_problem, spec_of

from bngrad_kernels import backends
from bngrad_kernels.problem import AnyProblem, Array

SHAPES = [
    *[(1, 1, 1), (33, 1, 1), (70, 37, 1), (9, 1057, 1)],  # rows
    *[(4, 3, 49), (20, 33, 9)],  # small planes
    *[(4, 3, 196), (3, 5, 255), (2, 3, 513), (1, 2, 40_007)],  # planes
]
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    backend = backends.create("cpu", threads=2)
    for shape, dtype, order, is_training in itertools.product(SHAPES, DTYPES, ORDERS, MODES):
        for at_end in (False, True):
            print(shape, dtype, f"order {order}, {is_training=}, {at_end=}", flush=True)
            spec = spec_of(order, shape, dtype, is_training=is_training)
            usual, fenced = random_problem(spec), random_problem(spec)
            for name in _names(fenced):
                _fence(fenced, name, at_end)
            backend.run([usual])
            backend.run([fenced])
            for name in (*fenced.large_outputs, *fenced.small_outputs):
                assert getattr(fenced, name).tobytes() == getattr(usual, name).tobytes(), name


def _names(problem: AnyProblem) -> tuple[str, ...]:
    return (*problem.large_inputs, *problem.small_inputs, *problem.large_outputs, *problem.small_outputs)


def _fence(problem: AnyProblem, name: str, at_end: bool) -> None:
    """Moves an array to where its pages end or begin."""
    array: Array = getattr(problem, name)
    pages = -(-array.nbytes // mmap.PAGESIZE)
    memory = np.frombuffer(mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE), np.uint8)
    inside = memory[mmap.PAGESIZE : -mmap.PAGESIZE]
    start = inside.nbytes - array.nbytes if at_end else 0
    moved = inside[start:][: array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    setattr(problem, name, moved)
    for fence in (memory[: mmap.PAGESIZE], memory[-mmap.PAGESIZE :]):
        if _libc.mprotect(ctypes.c_void_p(fence.ctypes.data), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")


if __name__ == "__main__":
    main()
