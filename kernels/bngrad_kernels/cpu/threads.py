"""The threads that compute a kernel: those of GNU OpenMP, which wait for their next call, or Python's own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from typing import Any, Protocol

_C_INT = ctypes.CFUNCTYPE(ctypes.c_int)
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_usleep = ctypes.CDLL(None).usleep


class Threads(Protocol):
    """Runs kernels on a team of threads.

    Attributes:
        functions: The addresses of the C functions by which a thread learns its number in the team, and sleeps for some
            microseconds.
    """

    functions: tuple[int, ...]

    def run(self, kernel: int, call: int, count: int) -> None:
        """Calls the kernel with the address of its call, in each of at most ``count`` threads."""


class OpenMpThreads:
    """The threads of GNU OpenMP, which its library keeps for each calling thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Uses the library ``libgomp``."""
        self.functions: tuple[int, ...] = _address(library.omp_get_thread_num), _address(_usleep)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self._teams = threading.local()

    def run(self, kernel: int, call: int, count: int) -> None:
        """See `Threads`."""
        if getattr(self._teams, "count", 1) != count:
            count = self._new_team(count)
        self._parallel(kernel, call, count, 0)

    def _new_team(self, count: int) -> int:
        """Returns how many threads to use from now on: the library ends the process if it cannot start one."""
        if not _can_start(count - 1):
            return 1
        self._teams.count = count
        return count


class PythonThreads:
    """Threads of Python, started for each call: slower, but always there."""

    def __init__(self) -> None:
        self._member = threading.local()
        self._callback = _C_INT(lambda: self._member.number)
        self.functions: tuple[int, ...] = _address(self._callback), _address(_usleep)

    def run(self, kernel: int, call: int, count: int) -> None:
        """See `Threads`."""
        others = []
        with contextlib.suppress(RuntimeError):  # the system has no more threads: those that there are do all the work
            for number in range(1, count):
                thread = threading.Thread(target=self.join, args=(kernel, call, number))
                thread.start()
                others.append(thread)
        self.join(kernel, call, 0)
        for thread in others:
            thread.join()

    def join(self, kernel: int, call: int, number: int) -> None:
        """Calls the kernel as a member of a team."""
        self._member.number = number
        _KERNEL(kernel)(call)


def _can_start(count: int) -> bool:
    """Whether the system can start this number of threads."""
    end = threading.Event()
    started = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        end.set()
        for thread in started:
            thread.join()
    return True


@functools.cache
def threads() -> Threads:
    """GNU OpenMP's where its library is installed."""
    try:
        return OpenMpThreads(ctypes.CDLL("libgomp.so.1"))
    except OSError:
        return PythonThreads()


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
