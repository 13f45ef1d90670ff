"""The CPU backend: compiled kernels on a team of threads."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from bngrad_kernels import machine
from bngrad_kernels.backend import Backend
from bngrad_kernels.cpu.machine_code import loader
from bngrad_kernels.cpu.machine_code.kernels import FIRST, Kernel, host
from bngrad_kernels.cpu.plan import PAGE_NBYTES, Plan, plan
from bngrad_kernels.cpu.records import (
    BEGIN,
    GROUPS,
    PROBLEMS,
    begin_of,
    new_call,
    place,
    place_at,
    place_workspace,
    share_workspace,
    task,
)
from bngrad_kernels.cpu.threads import MAX_THREADS, team
from bngrad_kernels.problem import AnyProblem, Array, address_of_array
from bngrad_kernels.spec import Spec

ALONE_BELOW_NBYTES = 1 << 20
"""Smaller tensors are computed by one thread: waking the others, which sleep, would cost more."""

_MAX_SLOT_NBYTES, _MAX_SCRATCH_NBYTES = 16 << 20, 1 << 20
"""A problem that needs larger memory, as for very many channels, is computed in parts, one after the other."""


class CpuBackend(Backend):
    """Computes problems on the CPU.

    Attributes:
        description: The processor, and how many threads are used.
        memory_nbytes: 0, since a CPU has no memory of its own.
        used_nbytes: 0 likewise.
    """

    memory_nbytes = used_nbytes = 0

    def __init__(self, threads: int | None = None) -> None:
        """Creates a backend, which any number of threads may call.

        Args:
            threads: How many threads it uses, up to `bngrad_kernels.cpu.threads.MAX_THREADS`; None for one per core
                that this process may use, or as few as ``OMP_NUM_THREADS`` says.
        """
        self._threads = min(threads or machine.threads(), MAX_THREADS)
        self._kernels: dict[tuple[Any, int], loader.LoadedKernel] = {}
        self._loading = threading.Lock()
        self._local = threading.local()
        self.description = f"{machine.processor()}, {self._threads} thread{'s' * (self._threads != 1)}"

    def register(self, memory: Array) -> None:
        """Does nothing: the CPU reaches all host memory directly."""

    def unregister(self, memory: Array) -> None:
        """Does nothing."""

    def warm_up(self) -> None:
        """Loads the kernel that most requests need, compiling it first if no cache has it; `run` loads the others."""
        self._load(np.dtype(FIRST.dtype), FIRST.order)

    def load_compiled(self, dtype: np.dtype[Any], order: int) -> bool:
        """Loads a kernel if a cache has it; returns False, and compiles nothing, if none has."""
        is_there = loader.is_compiled(Kernel(dtype.name, order), host())
        if is_there:
            self._load(dtype, order)
        return is_there

    def bound(self, problem: AnyProblem) -> Callable[[], None]:
        """Returns what computes a small problem, with channels, again and again at the same addresses.

        It computes in the calling thread, which keeps the interpreter's lock: for problems of microseconds.
        """
        planned = plan(problem.spec, problem.channels)
        workspace = np.empty(planned.slot_nbytes + planned.scratch_nbytes + 64, np.uint8)
        records = bytearray(planned.record)
        place(records, problem)
        place_workspace(records, -(-address_of_array(workspace) // 64) * 64, planned.scratch_nbytes)
        call = new_call(records)
        kernel = self._load(problem.spec.dtype, problem.spec.order)
        return _Bound(
            ctypes.PYFUNCTYPE(None, ctypes.c_int64)(kernel.alone_address), begin_of(call), (records, call, workspace)
        )

    def bound_to_team(self, problem: AnyProblem) -> Callable[[], None]:
        """Does as `bound`, but as `run` does it: with all threads if that pays, and without the interpreter's lock.

        The calls must not overlap.
        """
        prepared = self._prepare(problem)
        return prepared.run or functools.partial(
            self._run_alone, problem.spec, bytearray(prepared.record), prepared.planned
        )

    def bound_at(self, spec: Spec) -> Callable[..., None]:
        """Returns what computes problems of a spec of the first order, all channels, wherever their tensors are.

        Its arguments are the addresses of `records.FIRST_ORDER`; 0 for a scale of ones. Calls may overlap.
        """
        whole = plan(spec)
        self._load(spec.dtype, spec.order)  # now, so that no call fails for that
        plans = [whole] if _fits(whole) else [plan(spec, part) for part in _parts(whole)]
        bound = [
            functools.partial(self._run_alone_at, spec, planned)
            if self._is_alone(spec.tensor_nbytes, planned)
            else self._bound_to_team(spec, planned.record, planned)
            for planned in plans
        ]
        return bound[0] if len(bound) == 1 else functools.partial(_call_all, bound)

    def _bound_to_team(self, spec: Spec, record: bytes | bytearray, planned: Plan) -> Callable[..., None]:
        """Returns what computes a record with all threads, at the addresses in it or at those that it is given."""
        threads, slots, work = self._division(planned)
        scratch_nbytes = planned.scratch_nbytes * threads
        nbytes = scratch_nbytes + planned.slot_nbytes * slots
        records = bytearray(record)
        kernel = self._load(spec.dtype, spec.order)
        described = task(records, threads, work, kernel.join_address)

        def run(*addresses: int) -> None:
            all_cores = team()
            with all_cores.mutex:
                if addresses:
                    place_at(records, planned, addresses)
                place_workspace(records, self._workspace(nbytes), scratch_nbytes)
                all_cores.run(kernel, described, threads)

        return run

    def _run_alone_at(self, spec: Spec, planned: Plan, *addresses: int) -> None:
        """Computes a problem with one thread."""
        records = bytearray(planned.record)
        place_at(records, planned, addresses)
        self._run_alone(spec, records, planned)

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Writes the outputs of every problem: all threads share a large one, each takes small ones on its own."""
        small: list[AnyProblem] = []
        for problem in problems:
            prepared = problem.prepared
            if prepared is None or prepared.backend is not self:
                prepared = problem.prepared = self._prepare(problem)
            if prepared.run is None:
                small.append(problem)
            else:
                prepared.run()
        if len(small) == 1:
            prepared = small[0].prepared
            self._run_alone(small[0].spec, bytearray(prepared.record), prepared.planned)
            return
        for _, group in itertools.groupby(sorted(small, key=_sort_key), key=_sort_key):
            self._run_small(list(group))

    def _prepare(self, problem: AnyProblem) -> _Prepared:
        planned = plan(problem.spec, problem.channels)
        record = bytearray(planned.record)
        place(record, problem)
        run: Callable[[], None] | None = None
        if problem.channel_count == 0:
            run = _do_nothing
        elif not _fits(planned):
            parts = [replace(problem, channels=part, prepared=None) for part in _parts(planned)]
            run = functools.partial(self.run, parts)
        elif not self._is_alone(problem.tensor_nbytes, planned):
            run = self._bound_to_team(problem.spec, record, planned)
        return _Prepared(self, bytes(record), planned, run)

    def _is_alone(self, nbytes: int, planned: Plan) -> bool:
        """Whether one thread computes a problem with tensors of this size."""
        return self._threads == 1 or nbytes < ALONE_BELOW_NBYTES or self._division(planned)[0] == 1

    def _run_alone(self, spec: Spec, records: bytearray, planned: Plan) -> None:
        """Computes a problem, whose record lacks the workspace, with one thread."""
        place_workspace(records, self._workspace(planned.scratch_nbytes + planned.slot_nbytes), planned.scratch_nbytes)
        self._run(spec, records, 1, PROBLEMS)

    def _run_small(self, problems: list[AnyProblem]) -> None:
        """Computes problems for one kernel, each on a single thread."""
        nbytes = sum(problem.tensor_nbytes for problem in problems)
        threads = 1 if nbytes < ALONE_BELOW_NBYTES else min(self._threads, len(problems))
        records = bytearray(b"".join(problem.prepared.record for problem in problems))
        slot_nbytes = max(problem.prepared.planned.slot_nbytes for problem in problems)
        scratch_nbytes = max(problem.prepared.planned.scratch_nbytes for problem in problems)
        workspace = self._workspace((slot_nbytes + scratch_nbytes) * threads)
        share_workspace(records, workspace, slot_nbytes, scratch_nbytes, threads)
        self._run(problems[0].spec, records, threads, PROBLEMS)

    def _division(self, planned: Plan) -> tuple[int, int, int]:
        """Returns how many threads share a problem, how many workspaces they need, and what they begin with."""
        groups, tiles = planned.geometry.groups, planned.geometry.tiles
        if groups >= min(tiles, 4 * self._threads):
            threads = min(self._threads, groups)
            return threads, threads, GROUPS
        return min(self._threads, tiles), 1, BEGIN

    def _run(self, spec: Spec, records: bytearray, threads: int, work: int) -> None:
        kernel = self._load(spec.dtype, spec.order)
        if threads == 1:
            call = new_call(records)
            kernel.alone(begin_of(call))
        else:
            all_cores = team()
            with all_cores.mutex:
                all_cores.run(kernel, task(records, threads, work, kernel.join_address), threads)

    def _load(self, dtype: np.dtype[Any], order: int) -> loader.LoadedKernel:
        """Loads the kernel of an element type and an order, once."""
        if (kernel := self._kernels.get((dtype, order))) is not None:
            return kernel
        with self._loading:
            if (dtype, order) not in self._kernels:  # no other thread just loaded it
                self._kernels[dtype, order] = loader.load(Kernel(dtype.name, order))
            return self._kernels[dtype, order]

    def _workspace(self, nbytes: int) -> int:
        """Returns the address of a page of scratch memory, which each calling thread keeps for its next problem."""
        held: _Workspace | None = getattr(self._local, "workspace", None)
        if held is None or held.nbytes < nbytes:
            memory = np.empty(nbytes + PAGE_NBYTES, np.uint8)
            address = -(-address_of_array(memory) // PAGE_NBYTES) * PAGE_NBYTES
            # At once: an error or Ctrl-C before must leave the old one whole.
            held = self._local.workspace = _Workspace(nbytes, address, memory)
        return held.address


class _Workspace(NamedTuple):
    """Scratch memory: its size from its first page on, where that is, and the memory."""

    nbytes: int
    address: int
    memory: Array


class _Prepared(NamedTuple):
    """What a backend keeps of a problem for its next run.

    Attributes:
        backend: The backend.
        record: The problem's record, with all addresses but the workspace's.
        planned: Its plan.
        run: Computes it; None if one thread does that together with other small problems.
    """

    backend: CpuBackend
    record: bytes
    planned: Plan
    run: Callable[[], None] | None


class _Bound:
    """A problem's kernel, with the address of its call, and the memory that this refers to."""

    __slots__ = ("_address", "_function", "_memory")

    def __init__(self, function: Callable[[int], None], address: int, memory: object) -> None:
        self._function = function
        self._address = address
        self._memory = memory

    def __call__(self) -> None:
        self._function(self._address)


def _fits(planned: Plan) -> bool:
    return planned.slot_nbytes <= _MAX_SLOT_NBYTES and planned.scratch_nbytes <= _MAX_SCRATCH_NBYTES


def _parts(planned: Plan) -> list[range]:
    """Parts of the channels of a plan, which need little enough memory; each begins at a cache line."""
    channels = range(planned.geometry.first, planned.geometry.stop)
    share = min(_MAX_SLOT_NBYTES / planned.slot_nbytes, _MAX_SCRATCH_NBYTES / max(planned.scratch_nbytes, 1))
    width = int(len(channels) * share) // 64 * 64
    return [channels[start : start + width] for start in range(0, len(channels), width)]


def _call_all(functions: Sequence[Callable[..., None]], *arguments: int) -> None:
    for function in functions:
        function(*arguments)


def _do_nothing() -> None:
    """Computes a problem without channels."""


def _sort_key(problem: AnyProblem) -> tuple[int, int]:
    return problem.spec.dtype.num, problem.spec.order
