"""What a kernel is given in memory: the records of problems, see `plan.RECORD`, and the call of the team of threads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from bngrad_kernels.cpu.plan import RECORD, Plan
from bngrad_kernels.problem import AnyProblem, address_of_array

CALL = np.dtype(
    [
        (name, np.int64)
        for name in (
            "records", "count", "threads", "work", "kernel", "group", "may_repeat", "repeats",
            "phase", "done", "parts", "taken", "sleepers", "sem_wait", "sem_post",
        )
    ]
)  # fmt: skip
"""The call of a kernel: the address of its records and their number; among how many threads the work is shared, and
with what it begins; the kernel's address; which group is computed, and whether its sums may have to be taken again, and
have to.

The other fields are the team's: the addresses of its counters, of which the first has the phase that it is in, the
second how many parts of it are done, the third how many it has, and further ones how many parts of each thread's share
are taken; that of its `SLEEPER` records; those of two C functions. They are 0 where a thread computes alone.
"""

SLEEPER = np.dtype({"names": ["sleeps", "semaphore"], "formats": [np.int64, "V32"], "itemsize": 64})
"""A thread of a team: whether it sleeps, or is about to; and the C semaphore that wakes it up."""

PROBLEMS, GROUPS, BEGIN, SUMS, FINISH, APPLY, END = range(7)
"""What a team does in a phase. A call begins with whole problems, with whole groups of a problem, or with the first of
its groups, whose further phases are: its first tables; the sums of its tiles; the sums of these, and the other tables;
the outputs of its tiles.
"""

_COUNTERS = 3
COUNTER_NBYTES = 64
"""Counters are this far apart, so that threads that change different ones do not wait for each other."""

FIRST_ORDER = (
    "y_backprop", "x", "x_backprop", "scale", "reserve_space_1", "reserve_space_2", "scale_backprop", "offset_backprop",
)  # fmt: skip
"""The tensors of a `bngrad_kernels.problem.Problem` in the order of a record."""

_X_BACKPROP = FIRST_ORDER.index("x_backprop")
_TASK, _TEAM = struct.Struct("8q"), struct.Struct("7q")
"""The fields of a `CALL` that each call sets, and those of the team."""
_FIELD = struct.Struct("q")
_ADDRESSES = struct.Struct(f"{len(FIRST_ORDER)}q")
"""The first fields of a record."""
_OFFSETS = {name: 8 * i for i, name in enumerate(RECORD.names or ())}
_RECORD_NAMES = {"reserve_space_1": "mean"}


def place(record: bytearray, problem: AnyProblem) -> None:
    """Completes the record of a plan but for the workspace; NumPy would take three times as long to set its fields."""
    for name in (*problem.large_inputs, *problem.small_inputs, *problem.small_outputs):
        array = getattr(problem, name)
        _put(record, name, 0 if array is None else address_of_array(array))
    for name in problem.large_outputs:
        _put(record, name, address_of_array(getattr(problem, name)), is_large_output=True)


def place_at(record: bytearray, planned: Plan, addresses: Sequence[int]) -> None:
    """Completes the record of a plan of the first order but for the workspace."""
    _ADDRESSES.pack_into(record, 0, *addresses)
    streams = _OFFSETS["streams"]
    is_aligned = addresses[_X_BACKPROP] % 64 == 0
    _FIELD.pack_into(record, streams, _FIELD.unpack_from(planned.record, streams)[0] if is_aligned else 0)


def place_workspace(record: bytearray, address: int, scratch_nbytes: int) -> None:
    """Writes to a record where the memory of each thread begins, and behind all of that its slots."""
    _FIELD.pack_into(record, _OFFSETS["scratch"], address)
    _FIELD.pack_into(record, _OFFSETS["workspace"], address + scratch_nbytes)


def share_workspace(records: bytearray, address: int, slot_nbytes: int, scratch_nbytes: int, threads: int) -> None:
    """Writes the same workspace to several records, with a slot for each thread."""
    workspace = {
        "scratch": address,
        "scratch_nbytes": scratch_nbytes,
        "workspace": address + scratch_nbytes * threads,
        "slot_nbytes": slot_nbytes,
    }
    for start in range(0, len(records), RECORD.itemsize):
        for name, value in workspace.items():
            _FIELD.pack_into(records, start + _OFFSETS[name], value)


def new_call(records: bytearray) -> bytearray:
    """Makes a `CALL` for a thread that computes alone."""
    return bytearray(task(records, 1, PROBLEMS, 0)).ljust(CALL.itemsize, b"\0")


def task(records: bytearray, threads: int, work: int, kernel: int) -> bytes:
    """Returns the fields of a `CALL` that say what is to be computed."""
    return _TASK.pack(begin_of(records), len(records) // RECORD.itemsize, threads, work, kernel, 0, 1, 0)


def counters_nbytes(threads: int) -> int:
    """The size of the counters of a team of some threads."""
    return (_COUNTERS + threads) * COUNTER_NBYTES


def begin_team(call: Any, counters: int, sleepers: int, functions: Sequence[int]) -> Any:
    """Writes to a `CALL`, and to its first counter, that a team waits for it; its other counters hold 0.

    Returns:
        The part of the `CALL` for what `task` returns.
    """
    counted = (counters + i * COUNTER_NBYTES for i in range(_COUNTERS + 1))
    _TEAM.pack_into(call, _TASK.size, *counted, sleepers, *functions)
    ctypes.c_int64.from_address(counters).value = END
    return memoryview(call).cast("B")[: _TASK.size]


def begin_of(memory: Any) -> int:
    """The address of memory that may be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _put(record: bytearray, name: str, address: int, *, is_large_output: bool = False) -> None:
    """Writes the address of a tensor; a large output that begins within a cache line does not bypass the caches."""
    _FIELD.pack_into(record, _OFFSETS[_RECORD_NAMES.get(name, name)], address)
    if is_large_output and address % 64:
        _FIELD.pack_into(record, _OFFSETS["streams"], 0)
