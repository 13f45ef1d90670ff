"""A CPU backend that computes the first order at once, whether or not its kernels are compiled."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bngrad_kernels.cpu.backend import CpuBackend
from bngrad_kernels.cpu.machine_code import loader
from bngrad_kernels.cpu.machine_code.kernels import FIRST, Kernel
from bngrad_kernels.cpu.uncompiled import first_order
from bngrad_kernels.errors import DeviceUnavailableError
from bngrad_kernels.problem import AnyProblem, Problem

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 60.0
_PRIORITY = 5
"""The compiler of the usual priority, 0, then gets a core as soon as it needs one."""


class EagerBackend(CpuBackend):
    """Computes in NumPy, to the same bits, while a thread has a kernel compiled; the second order waits for its own.

    NumPy takes ten to fifty times as long as the compiled kernel, hence some tenths of a second at 25 MB a tensor. The
    process must not flush subnormal numbers to zero, as NumPy would then do so.
    """

    def __init__(self, threads: int | None = None) -> None:
        """As `CpuBackend`."""
        super().__init__(threads)
        self._compile_at: dict[str, float] = {}
        self._mutex = threading.Lock()

    def warm_up(self) -> None:
        """Loads the kernel that most requests need, or begins to compile it."""
        self._has(np.dtype(FIRST.dtype))

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Does as `CpuBackend.run`, but waits for no compiler in the first order."""
        compiled: list[AnyProblem] = []
        others: list[Problem] = []
        for problem in problems:
            if isinstance(problem, Problem) and not self._has(problem.spec.dtype):
                others.append(problem)
            else:
                compiled.append(problem)
        if others:
            _run_in_numpy(others)
        super().run(compiled)

    def _has(self, dtype: np.dtype[Any]) -> bool:
        """Whether a kernel of the first order is loaded, or can be; if not, a thread has it compiled."""
        if (dtype, 1) in self._kernels:
            return True
        with self._mutex:
            if self.load_compiled(dtype, 1):
                return True
            if time.monotonic() >= self._compile_at.get(dtype.name, 0):
                self._begin_to_compile(dtype)
            return False

    def _begin_to_compile(self, dtype: np.dtype[Any]) -> None:
        self._compile_at[dtype.name] = math.inf
        try:
            threading.Thread(target=self._compile, args=(dtype,), name="compile-kernel", daemon=True).start()
        except RuntimeError:  # no thread is left: a later request tries again
            self._compile_at[dtype.name] = 0

    def _compile(self, dtype: np.dtype[Any]) -> None:
        try:
            self._kernels[dtype, 1] = loader.load(Kernel(dtype.name, 1))
        except Exception as error:
            is_expected = isinstance(error, DeviceUnavailableError)
            logger.warning("%s; NumPy computes what needs it", error, exc_info=not is_expected)
            self._compile_at[dtype.name] = time.monotonic() + _RETRY_AFTER_S


def _run_in_numpy(problems: Sequence[Problem]) -> None:
    """Computes problems in a thread that leaves a core to the compiler, for which all wait."""
    with ThreadPoolExecutor(1, "numpy", _lower_priority) as threads:
        try:
            computed: Iterable[None] = threads.map(first_order.run, problems)
        except RuntimeError:  # no thread is left
            computed = map(first_order.run, problems)
        list(computed)


def _lower_priority() -> None:
    """Lowers the priority of this thread alone, as Linux does it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
