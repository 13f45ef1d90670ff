"""The CPU backend: Numba kernels on a pool of threads."""

from __future__ import annotations

import itertools
import os
import platform
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numba
import numpy as np

from bngrad_kernels.backend import Backend
from bngrad_kernels.cpu import cache, driver
from bngrad_kernels.cpu.plan import RECORD, plan
from bngrad_kernels.cpu.simd import TAGS
from bngrad_kernels.problem import AnyProblem, Array, GradGradProblem, Problem
from bngrad_kernels.spec import TENSOR_DTYPES, Spec

_ALONE_BELOW_NBYTES = 1 << 17
"""Smaller tensors are computed by one thread: starting the others would cost more."""

_ALL_CORES = threading.Lock()
"""Held where problems run on several threads, as more than one at a time would only share the same cores, and by every
problem where Numba can run but one at a time."""

_RECORD_NAMES = {"reserve_space_1": "mean"}
_NO_SCALE = np.empty(0, np.float32)


class CpuBackend(Backend):
    """Computes problems on the CPU.

    Attributes:
        description: The processor, and how many threads are used.
        memory_nbytes: 0, since a CPU has no memory of its own.
        used_nbytes: 0 likewise.
    """

    memory_nbytes = used_nbytes = 0

    def __init__(self, threads: int | None = None, *, is_guest: bool = False) -> None:
        """Creates a backend, which any number of threads may call.

        Args:
            threads: How many threads it uses; None for one per core that this process may use.
            is_guest: Whether the calling threads may have other work for Numba, whose number of threads is then put
                back after each run.
        """
        self._threads = min(threads or len(os.sched_getaffinity(0)), numba.config.NUMBA_NUM_THREADS)
        self._local = threading.local()
        self._is_guest = is_guest
        numba.get_num_threads()  # starts Numba's threads, by which it chooses their kind
        self._can_overlap = numba.threading_layer() != "workqueue"
        self.description = f"{_processor()}, {self._threads} threads"

    def register(self, memory: Array) -> None:
        """Does nothing: the CPU reaches all host memory directly."""

    def unregister(self, memory: Array) -> None:
        """Does nothing."""

    def warm_up(self) -> None:
        """Compiles every kernel, or loads it from the disk cache."""
        with cache.filling():
            for dtype in TENSOR_DTYPES:
                x = np.ones((1, 1), dtype)
                stats = np.ones(1, np.float32)
                self._run_split(Problem.allocate(Spec(dtype, x.shape, 1), x, x, stats, stats, stats))

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Writes the outputs of every problem: all threads share a large one, each takes small ones on its own."""
        small: list[AnyProblem] = []
        for problem in problems:
            if problem.channel_count == 0:
                continue
            if self._threads == 1 or problem.tensor_nbytes < _ALONE_BELOW_NBYTES:
                small.append(problem)
            else:
                self._run_split(problem)
        if len(small) == 1 and small[0].prepared is None:
            self._run_alone(small[0])
            return
        for _, group in itertools.groupby(sorted(small, key=_dtype_number), key=_dtype_number):
            self._run_small(list(group))

    def _run_alone(self, problem: AnyProblem) -> None:
        """Computes a small problem for the first time, which is often the last."""
        planned = plan(problem.spec, problem.channels)
        records = np.frombuffer(bytearray(planned.record), RECORD)
        _place(records, 0, problem, True, self._workspace(planned.slot_nbytes))
        problem.prepared = (records.tobytes(), planned.slot_nbytes)
        self._run(problem, records, 1)

    def _run_small(self, problems: list[AnyProblem]) -> None:
        """Computes problems of one dtype, each on a single thread."""
        nbytes = sum(problem.tensor_nbytes for problem in problems)
        threads = 1 if len(problems) == 1 or nbytes < _ALONE_BELOW_NBYTES else self._threads
        prepared = [problem.prepared or _prepare(problem) for problem in problems]
        records = np.frombuffer(bytearray(b"".join(record for record, _ in prepared)), RECORD)
        slot_nbytes = max(nbytes for _, nbytes in prepared)
        workspace = self._workspace(slot_nbytes * threads)
        records["workspace"] = [workspace + i % threads * slot_nbytes for i in range(len(problems))]
        self._run(problems[0], records, threads)

    def _run_split(self, problem: AnyProblem) -> None:
        """Computes a problem with all threads."""
        geometry, slot_nbytes, record = plan(problem.spec, problem.channels)
        by_group = geometry.tiles < self._threads or geometry.groups >= 4 * self._threads
        records = np.frombuffer(bytearray(record), RECORD)
        slots = self._threads if by_group else 1
        _place(records, 0, problem, by_group, self._workspace(slot_nbytes * slots))
        self._run(problem, records, self._threads)

    def _run(self, problem: AnyProblem, records: Array, threads: int) -> None:
        before = numba.get_num_threads() if self._is_guest else getattr(self._local, "threads", 0)
        if before != threads:
            self._local.threads = threads
            numba.set_num_threads(threads)
        try:
            with nullcontext() if threads == 1 and self._can_overlap else _ALL_CORES:
                driver.run(TAGS[problem.spec.dtype], records, threads)
        finally:
            if self._is_guest and before != threads:
                numba.set_num_threads(before)

    def _workspace(self, nbytes: int) -> int:
        """Returns the address of scratch memory, which each calling thread keeps for its next problem."""
        if getattr(self._local, "nbytes", -1) < nbytes:
            self._local.nbytes = 2 * nbytes
            self._local.memory = np.empty(2 * nbytes + 64, np.uint8)
            self._local.address = -(-self._local.memory.ctypes.data // 64) * 64
        start: int = self._local.address
        return start


def _prepare(problem: AnyProblem) -> tuple[bytes, int]:
    """Returns the record of a small problem without its workspace, and the size of the workspace."""
    planned = plan(problem.spec, problem.channels)
    records = np.frombuffer(bytearray(planned.record), RECORD)
    _place(records, 0, problem, True, 0)
    problem.prepared = (records.tobytes(), planned.slot_nbytes)
    return records.tobytes(), planned.slot_nbytes


def _place(records: Array, i: int, problem: AnyProblem, by_group: bool, workspace: int) -> None:
    if isinstance(problem, GradGradProblem):
        _place_second_order(records[i], problem, by_group, workspace)
        return
    tensors = (problem.y_backprop, problem.x, problem.x_backprop)
    stats = (
        _NO_SCALE if problem.scale is None else problem.scale, problem.reserve_space_1, problem.reserve_space_2,
        problem.scale_backprop, problem.offset_backprop,
    )  # fmt: skip
    tensor_bytes = [tensor.reshape(-1).view(np.uint8) for tensor in tensors]
    driver.place(records, i, by_group, workspace, *tensor_bytes, *[vector.view(np.uint8) for vector in stats])


def _place_second_order(record: Any, problem: GradGradProblem, by_group: bool, workspace: int) -> None:
    """As `driver.place`, but in Python: slower, but compiling another function would cost more."""
    record["by_group"], record["workspace"] = by_group, workspace
    for name in (*problem.large_inputs, *problem.small_inputs, *problem.large_outputs, *problem.small_outputs):
        record[_RECORD_NAMES.get(name, name)] = getattr(problem, name).__array_interface__["data"][0]
    if record["grad_y_backprop"] % 64 or record["grad_x"] % 64:
        record["streams"] = 0


def _dtype_number(problem: AnyProblem) -> int:
    return problem.spec.dtype.num


def _processor() -> str:
    return _model_name(Path("/proc/cpuinfo")) or platform.processor() or platform.machine()


def _model_name(cpuinfo: Path) -> str | None:
    if not cpuinfo.exists():
        return None
    lines = cpuinfo.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
