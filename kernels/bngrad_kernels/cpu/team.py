"""The call of a kernel, and how the threads that compute it, its team, share the work and wait for each other.

They do so by counters in memory. The work is done in phases, and a phase in parts, of which each thread takes one after
the other. A thread that finds none left waits for the next phase: at first by looking, since the others mostly need
less time for what they have taken than Linux needs to wake a thread, and then by sleeping, as one of them may wait for
a core. sched_yield does not serve: beside a process that computes, Linux would not let the thread run again for
milliseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic

from bngrad_kernels.cpu import llvm
from bngrad_kernels.cpu.machine_code.linked import internal
from bngrad_kernels.cpu.plan import RECORD
from bngrad_kernels.cpu.records import CALL, COUNTER_NBYTES

_COUNTER_NBYTES = np.int64(COUNTER_NBYTES)
_LOOKS = 2000
"""Each with a pause, which takes 20 ns on an AMD EPYC and 45 ns on an Intel Xeon."""
_SLEEP_US = np.int64(20)
_WORKS = np.int64(8)
_TAKEN_BITS = np.int64(32)
"""A counter of parts that are taken has their number in these bits, and that of the phase in those above."""
_TAKEN = np.int64(2**32 - 1)


def _at(dtype: np.dtype[Any]) -> Any:
    """Makes the function that returns the record of a dtype at an address."""
    result = from_dtype(dtype)

    @intrinsic
    def at(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(result))

        return result(types.int64), codegen

    return at


call_at, record_at = _at(CALL), _at(RECORD)


@intrinsic
def number(typingctx: Any, function: Any) -> Any:
    """Calls a C function, by its address, that takes nothing and returns an int."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.FunctionType(llvm.I32, []).as_pointer())
        return builder.sext(builder.call(pointer, []), llvm.I64)

    return types.int64(types.int64), codegen


@intrinsic
def count(typingctx: Any, counter: Any) -> Any:
    """Adds 1 to a counter, by its address, and returns what it was; what others wrote before that can be read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _counter(builder, args), llvm.I64(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def exchange(typingctx: Any, counter: Any, expected: Any, value: Any) -> Any:
    """Sets a counter, by its address, if it has the value that is expected; returns what it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.cmpxchg(_counter(builder, args), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(found, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def read(typingctx: Any, counter: Any) -> Any:
    """Returns a counter, by its address; what others wrote before they changed it can be read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_counter(builder, args), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def write(typingctx: Any, counter: Any, value: Any) -> Any:
    """Sets a counter, by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _counter(builder, args), "release", 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Does nothing for a moment."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        llvm.pause(builder)
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def sleep(typingctx: Any, function: Any, microseconds: Any) -> Any:
    """Calls the C function usleep, by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.FunctionType(llvm.I32, [llvm.I32]).as_pointer())
        builder.call(pointer, [builder.trunc(args[1], llvm.I32)])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


def _counter(builder: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], llvm.I64.as_pointer())


@internal
def phase_after(phase: int, work: int) -> Any:
    """Returns the next phase, in which other work is done."""
    return (phase // _WORKS + 1) * _WORKS + work


@internal
def work_of(phase: int) -> Any:
    """What is done in a phase."""
    return phase % _WORKS


@internal
def begin_phase(call: Any, phase: int) -> None:
    """Begins a phase after all parts of the last one are done."""
    write(call.done, np.int64(0))
    for thread in range(call.threads):
        write(call.taken + thread * _COUNTER_NBYTES, phase // _WORKS << _TAKEN_BITS)
    write(call.phase, phase)


@internal
def take(call: Any, thread: int, phase: int, parts: int) -> Any:
    """Takes the next of the parts of a thread's share in a phase.

    Returns how many were taken before; the number of all parts if none is left or the phase has ended.
    """
    counter = call.taken + thread * _COUNTER_NBYTES
    seen = read(counter)
    while seen >> _TAKEN_BITS == phase // _WORKS and seen & _TAKEN < parts:
        found = exchange(counter, seen, seen + 1)
        if found == seen:
            return seen & _TAKEN
        seen = found
    return parts


@internal
def wait_for_change(call: Any, phase: int) -> int:
    """Waits until a phase has ended; returns the one that goes on."""
    looks, now = 0, read(call.phase)
    while now == phase:
        looks += 1
        if looks < _LOOKS:
            pause()
        else:
            sleep(call.usleep, _SLEEP_US)
        now = read(call.phase)
    return now
