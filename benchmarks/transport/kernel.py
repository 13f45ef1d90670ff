"""The kernel that every contestant computes with, and the contestant that calls it directly."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from benchmarks.transport import Call, Gradients, Prepare

from bngrad_kernels import backends
from bngrad_kernels.problem import Problem


class Kernel:
    """The CPU backend, warm. It runs one problem at a time, which may use all cores."""

    def __init__(self, threads: int) -> None:
        self._backend = backends.create("cpu", threads=threads)
        self._backend.warm_up()
        self._lock = threading.Lock()

    def run(self, problem: Problem) -> Gradients:
        with self._lock:
            self._backend.run([problem])
        return gradients(problem)


def gradients(problem: Problem) -> Gradients:
    return Gradients(problem.x_backprop, problem.scale_backprop, problem.offset_backprop)


def inputs_of(problem: Problem) -> Problem:
    """Returns a problem with the same inputs and new outputs."""
    return Problem.allocate(
        problem.spec, problem.y_backprop, problem.x, problem.scale, problem.reserve_space_1, problem.reserve_space_2
    )


@contextlib.contextmanager
def connect(kernel: Kernel) -> Iterator[Prepare]:
    @contextlib.contextmanager
    def prepare(problem: Problem) -> Iterator[Call]:
        own = inputs_of(problem)
        yield lambda: kernel.run(own)

    yield prepare
