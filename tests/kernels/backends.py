"""The backends that the kernels' tests run on.

Without ``BNGRAD_TEST_DEVICE`` these are the CPU backend, and the CUDA backend on an emulated GPU: the kernels' own
source, compiled by g++ for a CPU. With ``BNGRAD_TEST_DEVICE=cuda:N`` it is the CUDA backend on that GPU alone, since
such a machine may have neither Numba nor g++.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from tests.kernels.cuda.devices import TEST_DEVICE, cuda_backend

from bngrad_kernels import backends
from bngrad_kernels.backend import Backend

Case = tuple[Any, ...]

NAMES = ("cpu", "cuda-emulated", "cuda")

CPU_SHAPES = [  # (N, C, inner): full and broken vectors, rows, bands and tiles of both kernels
    (4, 1, 1), (3, 5, 1), (1, 1, 1),
    (1000, 3, 1), (33, 64, 1), (5000, 64, 1), (200, 17, 1), (700, 100, 1), (2, 2048, 1),
    (35, 1500, 1), (4, 5, 2), (3, 7, 9), (300, 5, 3), (7, 100, 49), (32, 70, 49), (9, 3, 127), (9, 3, 128), (1, 7, 129),
    (3, 1, 17), (9, 3, 196), (2, 3, 4000), (40, 3, 1024), (1, 1, 100_003), (3, 7, 50_000),
]  # fmt: skip
CUDA_SHAPES = {
    1: [  # (N, C, inner)
        (4, 1, 1), (3, 5, 1), (1, 1, 1),  # less than a vector
        (33, 64, 1), (200, 16, 1), (5000, 64, 1), (700, 104, 1), (2, 2048, 1),  # whole vectors, full or narrow groups
        (1000, 3, 1), (200, 17, 1), (35, 1500, 1),  # vectors that cannot be loaded in one piece
        (4, 5, 2), (300, 5, 3), (40, 64, 2), (40, 24, 9), (32, 64, 49), (32, 70, 49), (7, 100, 49),  # several channels
        (9, 3, 127), (9, 3, 128), (9, 6, 196), (9, 3, 511),  # rows that hardly fit the threads
        (2, 3, 4000), (40, 3, 1024), (40, 2, 1023), (1, 1, 100_003), (3, 1, 17),  # one channel a group
        (70_000, 16, 1), (1, 2, 1_100_000),  # several sections a group
    ],
    2: [
        (4, 1, 1), (3, 5, 1), (1, 1, 1),  # less than a vector
        (33, 64, 1), (700, 104, 1),  # whole vectors, full and narrow last groups
        (200, 17, 1), (35, 300, 1),  # vectors that cannot be loaded in one piece
        (300, 5, 3), (40, 24, 9), (7, 100, 49), (9, 6, 196), (9, 3, 511),  # several channels a group
        (2, 3, 4000), (5, 2, 1023), (3, 1, 17),  # one channel a group
    ],
}  # fmt: skip


@functools.cache
def create(name: str) -> Backend:
    """A backend by its name in `NAMES`; on a CPU with two threads."""
    return backends.create("cpu", threads=2) if name == "cpu" else cuda_backend()


def reason_to_skip(name: str) -> str | None:
    """Why a backend cannot be tested here."""
    if name == "cuda":
        return "needs a GPU: make gpu-test runs it" if TEST_DEVICE == "cpu" else None
    return None if TEST_DEVICE == "cpu" else "make test runs it, on a machine without a GPU"


def on_backends(
    cases: Iterable[Case] = ((),), *, cpu: Iterable[Case] | None = None, cuda: Iterable[Case] | None = None
) -> list[Any]:
    """Parameters for `backend` and the arguments after it: all cases for each backend, one for each that is skipped.

    ``cpu`` and ``cuda`` are the cases of these backends, if they differ.
    """
    chosen = {name: [*cases] for name in NAMES}
    if cpu is not None:
        chosen["cpu"] = [*cpu]
    if cuda is not None:
        chosen["cuda-emulated"] = chosen["cuda"] = [*cuda]
    parameters = []
    for name in NAMES:
        reason = reason_to_skip(name)
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        for case in chosen[name][:1] if reason else chosen[name]:
            parameters.append(pytest.param(name, *case, marks=marks, id="-".join([name, *map(str, case)])))
    return parameters


def each(*axes: Iterable[Any]) -> list[Case]:
    """Every combination of some arguments."""
    return [*itertools.product(*axes)]
