"""Rivals: each in a process of its own, and stopped when it is not its turn, so that no idle thread pool spins."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import peers
from benchmarks.kernels import cases

from bngrad_kernels import backends
from bngrad_kernels.problem import Array, Problem

BNGRAD, COPY = "bngrad", "copy"
_ENVIRONMENT = {
    # Freed memory stays with the process. Rivals that allocate their outputs would otherwise spend most of their
    # time on page faults.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_OTHER = "-2"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


@dataclass(frozen=True)
class Turn:
    """The time of each call of one turn, and the CPU time of all of them, on all threads."""

    seconds: list[float]
    cpu_seconds: float


class Rival:
    """The parent's end of a rival's process."""

    def __init__(self, name: str, threads: int, tensors: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(theirs, name.removesuffix(_OTHER), threads, tensors), daemon=True, name=name
        )
        with _environment({**_ENVIRONMENT, **dict.fromkeys(_THREAD_VARIABLES, str(threads)), **environment}):
            self._process.start()
        theirs.close()

    @classmethod
    def start_all(cls, names: list[str], threads: int, tensors: Path, second_libdnnl: Path | None) -> list[Rival]:
        """Starts rivals; those of oneDNN twice where there is a second library."""
        rivals = [cls(name, threads, tensors, {}) for name in names]
        if second_libdnnl is not None:
            directory = second_libdnnl.absolute().parent
            environment = {
                "BNGRAD_TEST_LIBDNNL": str(second_libdnnl.absolute()),
                # What Intel's SYCL build needs to find its parts.
                "LD_LIBRARY_PATH": str(directory),
                "OCL_ICD_FILENAMES": str(directory / "libintelocl.so"),
            }
            rivals += [cls(name + _OTHER, threads, tensors, environment) for name in names if "onednn" in name]
        return rivals

    def greeting(self) -> tuple[bool, str]:
        """Waits until it has imported its library: whether it could, and the version or the reason."""
        greeting: tuple[bool, str] = self._reply()
        return greeting

    def prepare(self, case: cases.Case) -> str | None:
        """Runs a case once and leaves x_backprop in the shared tensors; the reason where it cannot."""
        reply: str | None = self._ask("prepare", case)
        return reply

    def vectors(self) -> tuple[Array, Array]:
        """scale_backprop and offset_backprop of the run that `prepare` made."""
        vectors: tuple[Array, Array] = self._ask("vectors", None)
        return vectors

    def turn(self, seconds: float) -> Turn:
        """One call to wake the threads and to fill the caches, and then timed calls."""
        turn: Turn = self._ask("turn", seconds)
        return turn

    def end(self) -> None:
        self._signal(signal.SIGCONT)
        self._process.kill()
        self._process.join()

    def _ask(self, request: str, argument: Any) -> Any:
        self._signal(signal.SIGCONT)
        self._connection.send((request, argument))
        return self._reply()

    def _reply(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} ended, exit code {self._process.exitcode}") from None
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid:
            os.kill(self._process.pid, number)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for the processes started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def shared_tensors(path: Path, spec: Any) -> tuple[Array, Array, Array]:
    """y_backprop, x and x_backprop in a file that every process maps."""
    tensors = np.memmap(path, np.uint8, "r+", shape=3 * spec.tensor_nbytes).view(spec.dtype).reshape(3, *spec.shape)
    return tensors[0], tensors[1], tensors[2]


class _InPlaceKernel:
    """A computation that writes to the problem's own outputs."""

    def __init__(self, problem: Problem, compute: Callable[..., None], *arguments: Any) -> None:
        self._problem = problem
        self._compute = compute
        self._arguments = arguments

    def run(self) -> None:
        self._compute(*self._arguments)

    def gradients(self) -> tuple[Array, Array, Array]:
        return self._problem.x_backprop, self._problem.scale_backprop, self._problem.offset_backprop


def _load(name: str, threads: int) -> tuple[peers.Prepare, str]:
    if name == COPY:
        from benchmarks.kernels.copying import copy  # noqa: PLC0415 - only this rival should import Numba

        def prepare(problem: Problem) -> _InPlaceKernel:
            """Copies one tensor with all threads, each its half: what memory can do."""
            source, target = (each.reshape(-1).view(np.uint64) for each in (problem.x, problem.x_backprop))
            return _InPlaceKernel(problem, copy, source, target)

        return prepare, ""
    if name == BNGRAD:
        backend = backends.create("cpu", threads=threads)
        return lambda problem: _InPlaceKernel(problem, backend.run, [problem]), backend.description
    return peers.load(name), peers.version(name)


def _serve(connection: Connection, name: str, threads: int, tensors: Path) -> None:
    try:
        prepare, version = _load(name, threads)
    except (ImportError, OSError) as error:
        connection.send((False, str(error)))
        return
    connection.send((True, version))
    kernel: peers.Kernel | None = None
    while True:
        request, argument = connection.recv()
        if request == "prepare":
            kernel = None  # Frees the last case's memory.
            try:
                kernel = _prepare(prepare, argument.spec, tensors)
                connection.send(None)
            except peers.UnsupportedError as error:
                connection.send(str(error))
        elif request == "vectors":
            assert kernel is not None
            connection.send(kernel.gradients()[1:])
        else:
            assert kernel is not None
            connection.send(_turn(kernel, argument))


def _prepare(prepare: peers.Prepare, spec: Any, tensors: Path) -> peers.Kernel:
    dy, x, x_backprop = shared_tensors(tensors, spec)
    problem = cases.problem(spec, dy, x)
    kernel = prepare(problem)
    cases.poison(problem)
    kernel.run()
    np.copyto(x_backprop, kernel.gradients()[0])
    return kernel


def _turn(kernel: peers.Kernel, budget: float) -> Turn:
    kernel.run()
    seconds = []
    cpu_start, start = time.process_time(), time.perf_counter()
    now = start
    while now - start < budget:
        kernel.run()
        now, before = time.perf_counter(), now
        seconds.append(now - before)
    return Turn(seconds, time.process_time() - cpu_start)
