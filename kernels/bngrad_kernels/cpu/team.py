"""How the threads that compute a call, its team, share the work and wait for each other.

They do so by counters in memory. The work is done in phases, and a phase in parts, of which each thread takes one after
the other. A thread that finds none left waits for the next phase: at first by looking, since the others mostly need
less time for what they have taken than Linux needs to wake a thread, and then by sleeping, as one of them may wait for
a core.

No thread waits for one that has taken nothing. A thread that had no core may come when the call has ended, and the
caller's memory has gone. So a thread first reads the team's own memory alone, which stays. It reads the caller's memory
once it has taken a part, since the phase cannot end before that part is done.
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
from bngrad_kernels.cpu.records import CALL, COUNTER_NBYTES, END, SLEEPER

_COUNTER_NBYTES, _SLEEPER_NBYTES = np.int64(COUNTER_NBYTES), np.int64(SLEEPER.itemsize)
_SEMAPHORE = np.int64(SLEEPER.fields["semaphore"][1])  # type: ignore[index]
_LOOKS = 2000
"""Each with a pause, which takes 20 ns on an AMD EPYC and 45 ns on an Intel Xeon."""
_WORKS = np.int64(8)
_END = np.int64(END)
_TAKEN_BITS = np.int64(32)
"""A counter of parts that are taken has their number in these bits, and that of the phase, modulo 2**31, above."""
_TAKEN, _PHASES = np.int64(2**32 - 1), np.int64(2**31 - 1)


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
def count(typingctx: Any, counter: Any) -> Any:
    """Adds 1 to a counter, by its address, and returns what it was; what others wrote before that can be read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _counter(builder, args), llvm.I64(1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def exchange(typingctx: Any, counter: Any, value: Any) -> Any:
    """Sets a counter, by its address, and returns what it was; all threads see all exchanges and reads in one order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _counter(builder, args), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchange_if(typingctx: Any, counter: Any, expected: Any, value: Any) -> Any:
    """Sets a counter, by its address, if it has the value that is expected; returns what it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.cmpxchg(_counter(builder, args), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(found, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def read(typingctx: Any, counter: Any) -> Any:
    """Returns a counter, by its address; what others wrote before they changed it can be read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_counter(builder, args), "seq_cst", 8)

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
def of_semaphore(typingctx: Any, function: Any, semaphore: Any) -> Any:
    """Calls a C function, by its address, that takes a semaphore and returns an int."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.FunctionType(llvm.I32, [llvm.I64]).as_pointer())
        return builder.sext(builder.call(pointer, [args[1]]), llvm.I64)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def join_by(typingctx: Any, kernel: Any, call: Any, member: Any) -> Any:
    """Calls a kernel, by its address, as a member of the team of a call, by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [llvm.I64] * 3)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [args[1], args[2], args[0]])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


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
def begin_phase(call: Any, phase: int, parts: int, member: int) -> None:
    """Begins a phase after all parts of the last one are done, and wakes those who sleep."""
    threads = call.threads
    for thread in range(threads):
        write(call.taken + thread * _COUNTER_NBYTES, _tag(phase) << _TAKEN_BITS)
    # A thread that already sees the next number of parts can no longer take any of the last phase.
    write(call.parts, parts)
    write(call.done, np.int64(0))
    exchange(call.phase, phase)
    # After the end, the caller's memory may have gone, and the next call may have begun.
    for thread in range(1 if work_of(phase) == _END else threads):
        if thread != member:
            wake(call, thread)


@internal
def take(call: Any, thread: int, phase: int, parts: int) -> Any:
    """Takes the next of the parts of a thread's share in a phase.

    Returns how many were taken before; the number of all parts if none is left or the phase has ended.
    """
    counter = call.taken + thread * _COUNTER_NBYTES
    seen = read(counter)
    while seen >> _TAKEN_BITS == _tag(phase) and seen & _TAKEN < parts:
        found = exchange_if(counter, seen, seen + 1)
        if found == seen:
            return seen & _TAKEN
        seen = found
    return parts


@internal
def wait_for_change(call: Any, phase: int, member: int) -> int:
    """Waits until a phase has ended; returns the one that goes on."""
    looks, now = 0, read(call.phase)
    while now == phase:
        looks += 1
        if looks < _LOOKS:
            pause()
        else:
            sleep(call, phase, member)
        now = read(call.phase)
    return now


@internal
def sleep(call: Any, phase: int, member: int) -> None:
    """Sleeps until a phase has ended; may return sooner."""
    sleeper = call.sleepers + member * _SLEEPER_NBYTES
    exchange(sleeper, np.int64(1))
    # Either this thread sees the next phase, or the one that has begun it sees that this one sleeps.
    if read(call.phase) != phase and exchange(sleeper, np.int64(0)) == 1:
        return
    while of_semaphore(call.sem_wait, sleeper + _SEMAPHORE) != 0:  # a signal came
        pass


@internal
def wake(call: Any, member: int) -> None:
    """Wakes a member of the team that sleeps."""
    sleeper = call.sleepers + member * _SLEEPER_NBYTES
    if read(sleeper) == 1 and exchange(sleeper, np.int64(0)) == 1:
        of_semaphore(call.sem_post, sleeper + _SEMAPHORE)


@internal
def help_with_calls(call: Any, address: int, member: int) -> None:
    """Takes part in the calls of a team, forever."""
    phase = read(call.phase)
    while True:
        if work_of(phase) == _END or member >= call.threads:
            phase = wait_for_change(call, phase, member)
        else:
            join_by(call.kernel, address, member)
            phase = read(call.phase)


@internal
def _tag(phase: int) -> Any:
    return phase // _WORKS & _PHASES
