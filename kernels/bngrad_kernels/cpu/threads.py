"""The threads that compute large calls together, of which Python starts all but the caller's, once."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import Any

from bngrad_kernels.cpu.machine_code.loader import LoadedKernel
from bngrad_kernels.cpu.records import CALL, SLEEPER, begin_call, begin_team, counters_nbytes

MAX_THREADS = 1024
_LINE_NBYTES = 64
_SEMAPHORE_OFFSET = SLEEPER.fields["semaphore"][1]  # type: ignore[index]
_libc = ctypes.CDLL(None)
_libc.aligned_alloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_core_of_caller = ctypes.PyDLL(None).sched_getcpu


class Team:
    """The calling thread, and those that help it; one call at a time, as more would share the same cores."""

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._mutex = threading.Lock()
        self._call = _new_memory()
        self._address = ctypes.addressof(self._call)
        self._helpers: list[threading.Thread] = []
        self._core = -1

    def run(self, kernel: LoadedKernel, records: bytearray, threads: int, work: int) -> None:
        """Computes records.

        Args:
            kernel: The kernel.
            records: One or more `bngrad_kernels.cpu.plan.RECORD`, complete.
            threads: Among how many threads to share the work; up to `MAX_THREADS`.
            work: What it begins with, see `bngrad_kernels.cpu.records.PROBLEMS`.
        """
        with self._mutex:
            if len(self._helpers) < threads - 1:
                self._start(kernel, threads)
            if (core := _core_of_caller()) != self._core:
                self._keep_off(core)
            begin_call(self._call, records, threads, work, kernel.join_address)
            kernel.join(self._address, 0, kernel.join_address)

    def _start(self, kernel: LoadedKernel, threads: int) -> None:
        """Starts helpers, as many as the system has threads for: whoever is there does all the work."""
        with contextlib.suppress(RuntimeError):
            for member in range(len(self._helpers) + 1, threads):
                name = f"bngrad-kernel-{member}"
                helper = threading.Thread(target=self.help, args=(kernel, member), name=name, daemon=True)
                helper.start()
                self._helpers.append(helper)
                self._core = -1

    def _keep_off(self, core: int) -> None:
        """Has the helpers run on other cores than the caller.

        While all cores are busy, as with another library's threads that wait for work by looking, Linux wakes a thread
        on the core where it ran last, or on that of the one that wakes it. There it would come when all is done.
        """
        self._core = core
        others = os.sched_getaffinity(0) - {core}
        for helper in self._helpers:
            assert helper.native_id is not None
            with contextlib.suppress(OSError):  # there is no other core, or a sandbox forbids it
                os.sched_setaffinity(helper.native_id, others)

    def help(self, kernel: LoadedKernel, member: int) -> None:
        """Takes part in all calls, in a helper's thread."""
        kernel.help(self._address, member)


@functools.cache
def team() -> Team:
    """The team of this process; a process that was forked has one of its own, as it has no other thread."""
    return Team()


os.register_at_fork(after_in_child=team.cache_clear)


def _new_memory() -> Any:
    """Returns a `CALL`, with its team's memory behind it, which is never freed: as Python ends, threads look at it."""
    counters = -(-CALL.itemsize // _LINE_NBYTES) * _LINE_NBYTES
    sleepers = counters + counters_nbytes(MAX_THREADS)
    nbytes = sleepers + MAX_THREADS * SLEEPER.itemsize
    begin = _libc.aligned_alloc(_LINE_NBYTES, nbytes)
    if begin is None:
        raise MemoryError(f"no {nbytes} bytes for a team of threads")
    ctypes.memset(begin, 0, nbytes)
    for sleeper in range(begin + sleepers, begin + nbytes, SLEEPER.itemsize):
        _libc.sem_init(sleeper + _SEMAPHORE_OFFSET, 0, 0)
    call = (ctypes.c_char * CALL.itemsize).from_address(begin)
    begin_team(call, begin + counters, begin + sleepers, _address(_libc.sem_wait), _address(_libc.sem_post))
    return call


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
