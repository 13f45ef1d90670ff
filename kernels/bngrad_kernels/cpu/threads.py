"""The threads that compute a kernel: those of GNU OpenMP, which wait for their next call, or Python's own."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Protocol

_C_INT = ctypes.CFUNCTYPE(ctypes.c_int)
_C_VOID = ctypes.CFUNCTYPE(None)
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Threads(Protocol):
    """Runs kernels on a team of threads.

    Attributes:
        functions: The addresses of the C functions by which a thread learns its number in the team and the team's size,
            and waits for the rest of the team. Outside of a team they are 0, 1 and nothing.
    """

    functions: tuple[int, ...]

    def run(self, kernel: int, call: int, count: int) -> None:
        """Calls the kernel with the address of its call, in each of at most ``count`` threads."""


class OpenMpThreads:
    """The threads of GNU OpenMP, which its library keeps for each calling thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Uses the library ``libgomp``."""
        names = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
        self.functions = tuple(_address(getattr(library, name)) for name in names)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None

    def run(self, kernel: int, call: int, count: int) -> None:
        """See `Threads`."""
        self._parallel(kernel, call, count, 0)


class PythonThreads:
    """Threads of Python, started for each call: slower, but always there."""

    def __init__(self) -> None:
        self._member = threading.local()
        self._callbacks = _C_INT(self._number), _C_INT(self._size), _C_VOID(self._wait)
        self.functions = tuple(map(_address, self._callbacks))

    def run(self, kernel: int, call: int, count: int) -> None:
        """See `Threads`."""
        barrier, entry = threading.Barrier(count), _KERNEL(kernel)

        def join(number: int) -> None:
            self._member.number, self._member.barrier = number, barrier
            entry(call)
            del self._member.barrier

        others = [threading.Thread(target=join, args=(number,)) for number in range(1, count)]
        for thread in others:
            thread.start()
        join(0)
        for thread in others:
            thread.join()

    def _number(self) -> int:
        return self._member.number if self._size() > 1 else 0

    def _size(self) -> int:
        return self._member.barrier.parties if hasattr(self._member, "barrier") else 1

    def _wait(self) -> None:
        if hasattr(self._member, "barrier"):
            self._member.barrier.wait()


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
