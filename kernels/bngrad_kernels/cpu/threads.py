"""The threads that compute large calls together, of which Python starts all but the caller's, once."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import Any

from bngrad_kernels.cpu.machine_code.loader import LoadedKernel
from bngrad_kernels.cpu.records import CALL, SLEEPER, begin_team, counters_nbytes

MAX_THREADS = 1024
_LINE_NBYTES = 64
_SEMAPHORE_OFFSET = SLEEPER.fields["semaphore"][1]  # type: ignore[index]
_core_of_caller = ctypes.PyDLL(None).sched_getcpu
_libc = ctypes.CDLL(None)
_libc.aligned_alloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
_libc.aligned_alloc.restype = ctypes.c_void_p
_libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)


class Team:
    """The calling thread, and those that help it; one call at a time, as more would share the same cores.

    Attributes:
        mutex: Held by the caller during `run`.
    """

    def __init__(self) -> None:
        """Starts no thread yet."""
        self.mutex = threading.Lock()
        self._address, self._task = _new_memory()
        self._helpers: list[threading.Thread] = []
        # By address. They stay, also without their backend: a helper may sleep in the code of any.
        self._kernels: dict[int, LoadedKernel] = {}
        self._core = -1

    def run(self, kernel: LoadedKernel, task: bytes, threads: int) -> None:
        """Computes what `bngrad_kernels.cpu.records.task` has described, for this kernel and up to `MAX_THREADS`."""
        if len(self._helpers) < threads - 1:
            self._start(kernel, threads)
        self._kernels[kernel.join_address] = kernel
        if (core := _core_of_caller()) != self._core:
            self._keep_off(core)
        self._task[:] = task
        kernel.join(self._address, 0, kernel.join_address)

    def _start(self, kernel: LoadedKernel, threads: int) -> None:
        """Starts helpers, as many as the system has threads for; those that are there share all the work."""
        self._core = -1
        for member in range(len(self._helpers) + 1, threads):
            name = f"bngrad-kernel-{member}"
            helper = threading.Thread(target=self.help, args=(kernel, member), name=name, daemon=True)
            self._helpers.append(helper)  # first, or after Ctrl-C there might be two of this number
            try:
                helper.start()
            except RuntimeError:
                self._helpers.pop()
                return

    def _keep_off(self, core: int) -> None:
        """Has the helpers run on other cores than the caller.

        While all cores are busy, as with another library's threads that wait for work by looking, Linux wakes a thread
        on the core where it ran last, or on that of the one that wakes it. There it would come when all is done.
        """
        self._core = core
        others = os.sched_getaffinity(0) - {core}
        for native_id in filter(None, (helper.native_id for helper in self._helpers)):
            with contextlib.suppress(OSError):  # there is no other core, or a sandbox forbids it
                os.sched_setaffinity(native_id, others)

    def help(self, kernel: LoadedKernel, member: int) -> None:
        """Takes part in all calls, in a helper's thread."""
        kernel.help(self._address, member)


@functools.cache
def team() -> Team:
    """The team of this process; a process that was forked has one of its own, as it has no other thread."""
    return Team()


os.register_at_fork(after_in_child=team.cache_clear)


def _new_memory() -> tuple[int, Any]:
    """Returns the address of a `CALL`, with its team's memory behind it, and the part of it for tasks.

    It is never freed: as Python ends, threads still look at it.
    """
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
    functions = tuple(map(_address, (_libc.sem_wait, _libc.sem_post)))
    return begin, begin_team(call, begin + counters, begin + sleepers, functions)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
