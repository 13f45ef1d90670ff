"""The kernel that every contestant computes with, and the contestant that calls it directly."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

import numpy as np
from benchmarks.transport import Call, Gradients, Prepare

from bngrad_kernels import backends
from bngrad_kernels.problem import Array, Problem


class Kernel:
    """A backend, warm. It runs one problem at a time, which may use all cores or the whole GPU.

    Attributes:
        threads: Of the CPU's backend.
        device: Its name, such as "cpu" or "cuda:0".
        description: The device, in its vendor's words.
    """

    def __init__(self, threads: int, device: str = "cpu") -> None:
        self.threads, self.device = threads, device
        self._backend = backends.create(device, threads=threads)
        self._backend.warm_up()
        self._lock = threading.Lock()
        self.description = self._backend.description

    def run(self, problem: Problem) -> Gradients:
        with self._lock:
            self._backend.run([problem])
        return gradients(problem)

    @contextlib.contextmanager
    def memory(self, nbytes: int) -> Iterator[Array]:
        """Memory that begins with a page, which a GPU reaches as fast as possible."""
        memory = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
        pages = memory[-memory.ctypes.data % mmap.PAGESIZE :][:nbytes]
        self._backend.register(pages)
        yield pages
        self._backend.unregister(pages)


def gradients(problem: Problem) -> Gradients:
    return Gradients(problem.x_backprop, problem.scale_backprop, problem.offset_backprop)


@contextlib.contextmanager
def connect(kernel: Kernel) -> Iterator[Prepare]:
    @contextlib.contextmanager
    def prepare(problem: Problem) -> Iterator[Call]:
        spec = problem.spec
        with kernel.memory(3 * spec.tensor_nbytes) as memory:
            y_backprop, x, x_backprop = memory.view(spec.dtype).reshape(3, *spec.shape)
            y_backprop[...], x[...] = problem.y_backprop, problem.x
            stats = problem.scale, problem.reserve_space_1, problem.reserve_space_2
            outputs = x_backprop, *np.empty((2, spec.channels), spec.stats_dtype)
            own = Problem(spec, y_backprop, x, *stats, *outputs)
            yield lambda: kernel.run(own)

    yield prepare
