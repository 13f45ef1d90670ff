"""The kernels of a CPU in the front process: those that workers have compiled, since nothing is compiled here."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from bngrad_kernels.spec import Spec
from bngrad_server.errors import ComputeError

if TYPE_CHECKING:
    from bngrad_kernels.cpu.backend import CpuBackend
    from bngrad_kernels.problem import AnyProblem

logger = logging.getLogger(__name__)

_LOAD_INTERVAL_S = 1.0
_BRIEF_NBYTES = 2**20
"""With tensors below this size a gradient takes one thread some tens of microseconds. To release the interpreter's lock
takes as long, so other threads wait for it meanwhile."""


def failed(spec: Spec, error: Exception) -> ComputeError:
    """Logs that a problem could not be computed, and returns the error of its request."""
    logger.error("%s failed", spec, exc_info=error)
    return ComputeError(type(error).__name__)


class FrontKernels:
    """The kernels that are loaded, for any thread."""

    def __init__(self, threads: int) -> None:
        """Loads none yet; ``threads`` threads will compute a large problem."""
        self._threads = threads
        self._backend: CpuBackend | None = None
        self._loaded: set[tuple[Any, int]] = set()
        self._load_at = 0.0
        self._mutex = threading.Lock()

    @property
    def backend(self) -> CpuBackend:
        """Computes what the kernels are loaded for; there is none before."""
        assert self._backend is not None
        return self._backend

    def bound(self, problem: AnyProblem) -> Callable[[], None]:
        """Returns what computes a problem again and again at the same addresses; its calls must not overlap."""
        is_brief = problem.tensor_nbytes < _BRIEF_NBYTES
        return self.backend.bound(problem) if is_brief else self.backend.bound_to_team(problem)

    def has(self, spec: Spec) -> bool:
        """Whether the kernel for a spec is loaded; if not, a thread looks for it in the cache of compiled code."""
        if (spec.dtype, spec.order) in self._loaded:
            return True
        self._load(spec)
        return False

    def _load(self, spec: Spec) -> None:
        """Has a thread load a kernel, but not again and again while no worker has compiled it."""
        now = time.monotonic()
        with self._mutex:
            if now < self._load_at:
                return
            self._load_at = now + _LOAD_INTERVAL_S
        kernel = spec.dtype, spec.order
        with contextlib.suppress(RuntimeError):  # no thread is left: a later request tries again
            threading.Thread(target=self._load_now, args=kernel, name="load-kernel", daemon=True).start()

    def _load_now(self, dtype: np.dtype[Any], order: int) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as for workers: threads that wait take no core
        from bngrad_kernels.cpu.backend import CpuBackend  # noqa: PLC0415 - a server of GPUs does not need LLVM

        try:
            self._backend = backend = self._backend or CpuBackend(threads=self._threads)
            if backend.load_compiled(dtype, order):
                self._loaded.add((dtype, order))
        except Exception:
            logger.exception("a kernel cannot be loaded here; workers compute all requests for it")
