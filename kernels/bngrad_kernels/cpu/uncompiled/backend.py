"""A CPU backend that computes at once, whether or not its kernels are compiled."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bngrad_kernels.cpu.backend import CpuBackend
from bngrad_kernels.cpu.machine_code import loader
from bngrad_kernels.cpu.machine_code.kernels import FIRST, Kernel
from bngrad_kernels.cpu.records import FIRST_ORDER
from bngrad_kernels.cpu.uncompiled import first_order, float_mode, second_order
from bngrad_kernels.errors import DeviceUnavailableError
from bngrad_kernels.problem import AnyProblem, Array, Problem
from bngrad_kernels.spec import Spec

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 60.0
_PRIORITY = 5
"""The compiler, which has the usual priority 0, then gets a core as soon as it needs one."""
_MAX_SECOND_ORDER_ELEMENTS = 1 << 20
"""With more, a problem of the second order waits for its kernel: NumPy would take seconds and hundreds of megabytes."""


class EagerBackend(CpuBackend):
    """Computes in NumPy, to the same bits, while a thread has a kernel compiled.

    NumPy takes ten to fifty times as long as a kernel of the first order, hence some tenths of a second at 25 MB a
    tensor.
    """

    def __init__(self, threads: int | None = None) -> None:
        """As `CpuBackend`."""
        super().__init__(threads)
        self._compile_at: dict[Kernel, float] = {}
        self._mutex = threading.Lock()
        self._one_at_a_time = threading.Lock()  # a compiler takes a core and 200 MB

    @property
    def compiling(self) -> tuple[str, ...]:
        """The kernels that threads have compiled now, or will, such as ``float32-1``: dtype and order."""
        begun = [kernel for kernel, compile_at in list(self._compile_at.items()) if compile_at == math.inf]
        return tuple(str(kernel) for kernel in begun if (np.dtype(kernel.dtype), kernel.order) not in self._kernels)

    def warm_up(self) -> None:
        """Loads the kernel that most requests need, or begins to compile it."""
        self._has(FIRST)

    def bound_at(self, spec: Spec) -> Callable[..., None]:
        """As `CpuBackend.bound_at`, but what it returns computes in NumPy until the kernel is compiled."""
        bind = super().bound_at
        compiled = bind(spec) if self._is_loaded(spec) else None

        def compute_at(*addresses: int) -> None:
            nonlocal compiled
            if compiled is None and self._is_loaded(spec):
                compiled = bind(spec)
            if compiled is None:
                _run_in_numpy([_problem_at(spec, addresses)])
            else:
                compiled(*addresses)

        return compiled or compute_at

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Does as `CpuBackend.run`, but waits for no compiler where NumPy is faster."""
        compiled: list[AnyProblem] = []
        others: list[AnyProblem] = []
        for problem in problems:
            (compiled if self._is_loaded(problem.spec) or _is_too_large(problem) else others).append(problem)
        if others:
            _run_in_numpy(others)
        super().run(compiled)

    def _is_loaded(self, spec: Spec) -> bool:
        return (spec.dtype, spec.order) in self._kernels or self._has(Kernel(spec.dtype.name, spec.order))

    def _has(self, kernel: Kernel) -> bool:
        """Whether a kernel is loaded, or can be; if not, a thread has it compiled."""
        with self._mutex:
            if self.load_compiled(np.dtype(kernel.dtype), kernel.order):
                return True
            if time.monotonic() >= self._compile_at.get(kernel, 0):
                self._begin_to_compile(kernel)
            return False

    def _begin_to_compile(self, kernel: Kernel) -> None:
        self._compile_at[kernel] = math.inf
        try:
            threading.Thread(target=self._compile, args=(kernel,), name="compile-kernel", daemon=True).start()
        except RuntimeError:  # no thread is left: a later request tries again
            self._compile_at[kernel] = 0

    def _compile(self, kernel: Kernel) -> None:
        try:
            with self._one_at_a_time:
                self._kernels[np.dtype(kernel.dtype), kernel.order] = loader.load(kernel)
        except Exception as error:
            is_expected = isinstance(error, DeviceUnavailableError)
            logger.warning("%s; NumPy computes what needs it", error, exc_info=not is_expected)
            self._compile_at[kernel] = time.monotonic() + _RETRY_AFTER_S


def _is_too_large(problem: AnyProblem) -> bool:
    spec = problem.spec
    return spec.order == 2 and problem.tensor_nbytes > _MAX_SECOND_ORDER_ELEMENTS * spec.dtype.itemsize


def _run_in_numpy(problems: Sequence[AnyProblem]) -> None:
    """Computes problems in a thread that leaves a core to the compiler, for which all wait."""
    with ThreadPoolExecutor(1, "numpy", _lower_priority) as threads:
        try:
            computed: Iterable[None] = threads.map(compute, problems)
        except RuntimeError:  # no thread is left
            computed = map(compute, problems)
        list(computed)


def compute(problem: AnyProblem) -> None:
    """Writes the outputs of a problem."""
    with float_mode.default():
        if isinstance(problem, Problem):
            first_order.run(problem)
        else:
            second_order.run(problem)


def _problem_at(spec: Spec, addresses: Sequence[int]) -> Problem:
    """The problem with all channels whose tensors are at the addresses of `records.FIRST_ORDER`."""
    tensors: dict[str, Any] = {}
    for name, address in zip(FIRST_ORDER, addresses, strict=True):
        is_large = name in Problem.large_inputs + Problem.large_outputs
        shape, dtype = (spec.shape, spec.dtype) if is_large else ((spec.channels,), spec.stats_dtype)
        tensors[name] = _array_at(address, shape, dtype) if address else None
    return Problem(spec, **tensors)


def _array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    memory = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory), np.uint8).view(dtype).reshape(shape)


def _lower_priority() -> None:
    """Lowers the priority of this thread alone, as Linux does it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
