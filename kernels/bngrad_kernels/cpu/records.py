"""What a kernel is given in memory: the records of problems, see `plan.RECORD`, and the call of the team of threads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from bngrad_kernels.cpu.plan import RECORD, Plan
from bngrad_kernels.problem import AnyProblem, Array

CALL = np.dtype(
    [
        (name, np.int64)
        for name in (
            "records", "count", "threads", "member", "usleep", "phase", "done", "taken", "group",
            "may_repeat", "repeats",
        )
    ]
)  # fmt: skip
"""The call of a kernel: the address of its records and their number; among how many threads the work is shared; the C
functions by which a thread learns its number in the team, and sleeps; the addresses of the team's counters; which group
is computed, and whether its sums may have to be taken again, and have to.

The first counter has the phase that the team is in, the second how many parts of it are done, and further ones how many
parts of each thread's share are taken.
"""

PROBLEMS, GROUPS, BEGIN, SUMS, FINISH, APPLY, END = range(7)
"""What a team does in a phase. A call begins with whole problems, with whole groups of a problem, or with the first of
its groups, whose further phases are: its first tables; the sums of its tiles; the sums of these, and the other tables;
the outputs of its tiles.
"""

COUNTER_NBYTES = 64
"""Counters are this far apart, so that threads that change different ones do not wait for each other."""

FIRST_ORDER = (
    "y_backprop", "x", "x_backprop", "scale", "reserve_space_1", "reserve_space_2", "scale_backprop", "offset_backprop",
)  # fmt: skip
"""The tensors of a `bngrad_kernels.problem.Problem` in the order of a record."""

_X_BACKPROP = FIRST_ORDER.index("x_backprop")
_CALL = struct.Struct(f"{CALL.itemsize // 8}q")
_FIELD = struct.Struct("q")
_ADDRESSES = struct.Struct(f"{len(FIRST_ORDER)}q")
"""The first fields of a record."""
_OFFSETS = {name: 8 * i for i, name in enumerate(RECORD.names or ())}
_RECORD_NAMES = {"reserve_space_1": "mean"}


def place(record: bytearray, problem: AnyProblem) -> None:
    """Completes the record of a plan but for the workspace; NumPy would take three times as long to set its fields."""
    for name in (*problem.large_inputs, *problem.small_inputs, *problem.small_outputs):
        array = getattr(problem, name)
        _put(record, name, 0 if array is None else _address(array))
    for name in problem.large_outputs:
        _put(record, name, _address(getattr(problem, name)), is_large_output=True)


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


def new_call(records: bytearray, threads: int, work: int, functions: Sequence[int]) -> bytearray:
    """Makes a `CALL` that begins with some work, followed by its counters; the functions are those of the threads."""
    call = bytearray(CALL.itemsize + (2 + threads) * COUNTER_NBYTES)
    phase = begin_of(call) + CALL.itemsize
    counters = phase, phase + COUNTER_NBYTES, phase + 2 * COUNTER_NBYTES
    count = len(records) // RECORD.itemsize
    _CALL.pack_into(call, 0, begin_of(records), count, threads, *functions, *counters, 0, 1, 0)
    _FIELD.pack_into(call, CALL.itemsize, work)
    return call


def begin_of(memory: Any) -> int:
    """The address of memory that may be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _put(record: bytearray, name: str, address: int, *, is_large_output: bool = False) -> None:
    """Writes the address of a tensor; a large output that begins within a cache line does not bypass the caches."""
    _FIELD.pack_into(record, _OFFSETS[_RECORD_NAMES.get(name, name)], address)
    if is_large_output and address % 64:
        _FIELD.pack_into(record, _OFFSETS["streams"], 0)


def _address(array: Array) -> int:
    try:
        return begin_of(array)
    except (TypeError, ValueError):  # it is read-only, empty, or of bfloat16; NumPy takes four times as long
        address: int = array.__array_interface__["data"][0]
        return address
