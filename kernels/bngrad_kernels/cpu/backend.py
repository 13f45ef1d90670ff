"""The CPU backend: compiled kernels on a team of threads."""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bngrad_kernels import machine
from bngrad_kernels.backend import Backend
from bngrad_kernels.cpu.machine_code import loader
from bngrad_kernels.cpu.machine_code.kernels import FIRST, Kernel, host
from bngrad_kernels.cpu.plan import BEGIN, CALL, COUNTER_NBYTES, GROUPS, PROBLEMS, RECORD, Plan, plan
from bngrad_kernels.cpu.threads import threads as team
from bngrad_kernels.problem import AnyProblem, Array
from bngrad_kernels.spec import Spec

ALONE_BELOW_NBYTES = 1 << 20
"""Smaller tensors are computed by one thread: waking the others, which sleep, would cost more."""

_MAX_SLOT_NBYTES = 16 << 20
"""A problem that needs a larger workspace, as for very many channels, is computed in parts, one after the other."""

_ALL_CORES = threading.Lock()
"""Held where problems run on several threads, as more than one at a time would only share the same cores."""

FIRST_ORDER = (
    "y_backprop", "x", "x_backprop", "scale", "reserve_space_1", "reserve_space_2", "scale_backprop", "offset_backprop",
)  # fmt: skip
"""The tensors of a `bngrad_kernels.problem.Problem` in the order of a record, and of the arguments for `bound_at`."""

_X_BACKPROP = FIRST_ORDER.index("x_backprop")
_CALL = struct.Struct(f"{CALL.itemsize // 8}q")
_FIELD = struct.Struct("q")
_ADDRESSES = struct.Struct(f"{len(FIRST_ORDER)}q")
"""The first fields of a record."""
_OFFSETS = {name: 8 * i for i, name in enumerate(RECORD.names or ())}
_RECORD_NAMES = {"reserve_space_1": "mean"}


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
            threads: How many threads it uses; None for one per core that this process may use.
        """
        self._threads = threads or machine.cores()
        self._team = team()
        self._kernels: dict[tuple[Any, int], loader.LoadedKernel] = {}
        self._loading = threading.Lock()
        self._local = threading.local()
        self.description = f"{machine.processor()}, {self._threads} threads"

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
        workspace = np.empty(planned.slot_nbytes + 64, np.uint8)
        records = bytearray(planned.record)
        _place(records, problem)
        _FIELD.pack_into(records, _OFFSETS["workspace"], -(-workspace.ctypes.data // 64) * 64)
        call = self._call(records, 1, 1, PROBLEMS)
        kernel = self._load(problem.spec.dtype, problem.spec.order)
        return _Bound(
            ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(kernel.address), _begin(call), (records, call, workspace)
        )

    def bound_to_team(self, problem: AnyProblem) -> Callable[[], None]:
        """Does as `bound`, but as `run` does it: with all threads if that pays, and without the interpreter's lock.

        The calls must not overlap.
        """
        record, planned = problem.prepared or _prepare(problem)
        if self._is_alone(problem.tensor_nbytes) or planned.slot_nbytes > _MAX_SLOT_NBYTES:
            return lambda: self.run([problem])
        return self._bound_to_team(problem.spec, record, planned)

    def bound_at(self, spec: Spec) -> Callable[..., None]:
        """Returns what computes problems of a spec of the first order, all channels, wherever their tensors are.

        Its arguments are the addresses of the tensors of `FIRST_ORDER`; 0 for a scale of ones. Calls may overlap.
        """
        planned = plan(spec)
        if self._is_alone(spec.tensor_nbytes) or planned.slot_nbytes > _MAX_SLOT_NBYTES:
            return functools.partial(self._run_at, spec, planned)
        return self._bound_to_team(spec, planned.record, planned)

    def _bound_to_team(self, spec: Spec, record: bytes, planned: Plan) -> Callable[..., None]:
        """Returns what computes a record with all threads, at the addresses in it or at those that it is given."""
        slots, work = self._division(planned)
        records = bytearray(record)
        call = self._call(records, 1, self._threads, work)
        begin, unused = _begin(call), bytes(call)
        kernel = self._load(spec.dtype, spec.order)

        def run(*addresses: int) -> None:
            with _ALL_CORES:
                if addresses:
                    _place_at(records, planned, addresses)
                _FIELD.pack_into(records, _OFFSETS["workspace"], self._workspace(planned.slot_nbytes * slots))
                call[:] = unused
                self._team.run(kernel.address, begin, self._threads)

        return run

    def _run_at(self, spec: Spec, whole: Plan, *addresses: int) -> None:
        """Computes a problem with one thread, or one that needs too large a workspace in parts."""
        run = self._run_alone if self._is_alone(spec.tensor_nbytes) else self._run_split
        fits = whole.slot_nbytes <= _MAX_SLOT_NBYTES
        for planned in [whole] if fits else [plan(spec, part) for part in _narrow(whole)]:
            record = bytearray(planned.record)
            _place_at(record, planned, addresses)
            run(spec, record, planned)

    def run(self, problems: Sequence[AnyProblem]) -> None:
        """Writes the outputs of every problem: all threads share a large one, each takes small ones on its own."""
        small: list[AnyProblem] = []
        for problem in problems:
            if problem.channel_count == 0:
                continue
            record, planned = problem.prepared or _prepare(problem)
            if planned.slot_nbytes > _MAX_SLOT_NBYTES:
                self.run([replace(problem, channels=part, prepared=None) for part in _narrow(planned)])
            elif self._is_alone(problem.tensor_nbytes):
                small.append(problem)
            else:
                self._run_split(problem.spec, record, planned)
        if len(small) == 1:
            self._run_alone(small[0].spec, *(small[0].prepared or _prepare(small[0])))
            return
        for _, group in itertools.groupby(sorted(small, key=_sort_key), key=_sort_key):
            self._run_small(list(group))

    def _is_alone(self, nbytes: int) -> bool:
        return self._threads == 1 or nbytes < ALONE_BELOW_NBYTES

    def _run_alone(self, spec: Spec, record: bytes | bytearray, planned: Plan) -> None:
        """Computes a problem with one thread."""
        records = bytearray(record)
        _FIELD.pack_into(records, _OFFSETS["workspace"], self._workspace(planned.slot_nbytes))
        self._run(spec, records, 1, PROBLEMS)

    def _run_small(self, problems: list[AnyProblem]) -> None:
        """Computes problems for one kernel, each on a single thread."""
        nbytes = sum(problem.tensor_nbytes for problem in problems)
        threads = 1 if len(problems) == 1 or nbytes < ALONE_BELOW_NBYTES else self._threads
        prepared = [problem.prepared or _prepare(problem) for problem in problems]
        records = bytearray(b"".join(record for record, _ in prepared))
        slot_nbytes = max(planned.slot_nbytes for _, planned in prepared)
        workspace = self._workspace(slot_nbytes * threads)
        for start in range(0, len(records), RECORD.itemsize):
            _FIELD.pack_into(records, start + _OFFSETS["workspace"], workspace)
            _FIELD.pack_into(records, start + _OFFSETS["slot_nbytes"], slot_nbytes)
        self._run(problems[0].spec, records, threads, PROBLEMS)

    def _run_split(self, spec: Spec, record: bytes | bytearray, planned: Plan) -> None:
        """Computes a problem with all threads."""
        slots, work = self._division(planned)
        records = bytearray(record)
        _FIELD.pack_into(records, _OFFSETS["workspace"], self._workspace(planned.slot_nbytes * slots))
        self._run(spec, records, self._threads, work)

    def _division(self, planned: Plan) -> tuple[int, int]:
        """Returns how many workspaces all threads need for a problem, and the work that they begin with."""
        by_group = planned.geometry.groups >= min(planned.geometry.tiles, 4 * self._threads)
        return (self._threads, GROUPS) if by_group else (1, BEGIN)

    def _run(self, spec: Spec, records: bytearray, threads: int, work: int) -> None:
        kernel = self._kernels.get((spec.dtype, spec.order)) or self._load(spec.dtype, spec.order)
        count = len(records) // RECORD.itemsize
        call = self._call(records, count, threads, work)
        if threads == 1:
            kernel.function(_begin(call))
        else:
            with _ALL_CORES:
                self._team.run(kernel.address, _begin(call), threads)

    def _call(self, records: bytearray, count: int, threads: int, work: int) -> bytearray:
        """Makes a `CALL` that begins with some work, followed by its counters."""
        call = bytearray(CALL.itemsize + (2 + threads) * COUNTER_NBYTES)
        phase = _begin(call) + CALL.itemsize
        counters = phase, phase + COUNTER_NBYTES, phase + 2 * COUNTER_NBYTES
        _CALL.pack_into(call, 0, _begin(records), count, threads, *self._team.functions, *counters, 0, 1, 0)
        _FIELD.pack_into(call, CALL.itemsize, work)
        return call

    def _load(self, dtype: np.dtype[Any], order: int) -> loader.LoadedKernel:
        """Loads the kernel of an element type and an order, unless another thread just did."""
        with self._loading:
            if (dtype, order) not in self._kernels:
                self._kernels[dtype, order] = loader.load(Kernel(dtype.name, order))
            return self._kernels[dtype, order]

    def _workspace(self, nbytes: int) -> int:
        """Returns the address of scratch memory, which each calling thread keeps for its next problem."""
        if getattr(self._local, "nbytes", -1) < nbytes:
            self._local.nbytes = nbytes
            self._local.memory = np.empty(nbytes + 64, np.uint8)
            self._local.address = -(-self._local.memory.ctypes.data // 64) * 64
        start: int = self._local.address
        return start


class _Bound:
    """A problem's kernel, with the address of its call, and the memory that this refers to."""

    __slots__ = ("_address", "_function", "_memory")

    def __init__(self, function: Callable[[int], None], address: int, memory: object) -> None:
        self._function = function
        self._address = address
        self._memory = memory

    def __call__(self) -> None:
        self._function(self._address)


def _narrow(planned: Plan) -> list[range]:
    """Parts of the channels of a plan, whose workspaces are small enough; each begins at a cache line."""
    channels = range(planned.geometry.first, planned.geometry.stop)
    width = len(channels) * _MAX_SLOT_NBYTES // planned.slot_nbytes // 64 * 64
    return [channels[start : start + width] for start in range(0, len(channels), width)]


def _prepare(problem: AnyProblem) -> tuple[bytes, Plan]:
    """Returns, and keeps for the next run, a problem's record with all addresses but the workspace's, and its plan."""
    planned = plan(problem.spec, problem.channels)
    record = bytearray(planned.record)
    _place(record, problem)
    prepared = bytes(record), planned
    problem.prepared = prepared
    return prepared


def _place(record: bytearray, problem: AnyProblem) -> None:
    """Completes the record of a plan but for the workspace; NumPy would take three times as long to set its fields."""
    for name in (*problem.large_inputs, *problem.small_inputs, *problem.small_outputs):
        array = getattr(problem, name)
        _put(record, name, 0 if array is None else _address(array))
    for name in problem.large_outputs:
        _put(record, name, _address(getattr(problem, name)), is_large_output=True)


def _place_at(record: bytearray, planned: Plan, addresses: Sequence[int]) -> None:
    """Completes the record of a plan of the first order but for the workspace."""
    _ADDRESSES.pack_into(record, 0, *addresses)
    streams = _OFFSETS["streams"]
    is_aligned = addresses[_X_BACKPROP] % 64 == 0
    _FIELD.pack_into(record, streams, _FIELD.unpack_from(planned.record, streams)[0] if is_aligned else 0)


def _put(record: bytearray, name: str, address: int, *, is_large_output: bool = False) -> None:
    """Writes the address of a tensor; a large output that begins within a cache line does not bypass the caches."""
    _FIELD.pack_into(record, _OFFSETS[_RECORD_NAMES.get(name, name)], address)
    if is_large_output and address % 64:
        _FIELD.pack_into(record, _OFFSETS["streams"], 0)


def _address(array: Array) -> int:
    try:
        return _begin(array)
    except (TypeError, ValueError):  # it is read-only, empty, or of bfloat16; NumPy takes four times as long
        address: int = array.__array_interface__["data"][0]
        return address


def _begin(memory: Any) -> int:
    """The address of memory that may be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _sort_key(problem: AnyProblem) -> tuple[int, int]:
    return problem.spec.dtype.num, problem.spec.order
