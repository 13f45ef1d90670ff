"""Copies arrays with two threads: the caller's, and one that helps from when it has woken up."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np

from bngrad._deadline import held_back
from bngrad.typing import Array

_ALONE_BELOW_NBYTES = 2**22
"""Less is copied by the caller's thread alone: the other one would take longer to begin."""
_PIECES = 8
"""The last piece, for which one thread may wait, is short; many pieces would take longer to copy."""
_WHOLE_ABOVE_NBYTES = 2**24
"""Of more, arrays are copied whole: the C library copies very large ones past the caches, in 3/4 of the time."""
_core_of_caller = ctypes.PyDLL(None).sched_getcpu


class Copier:
    """A thread that helps to copy, started when it is first needed."""

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._queue: SimpleQueue[_Copies | None] = SimpleQueue()
        self._mutex = threading.Lock()
        # One object, which Python starts once, also after Ctrl-C has come amid that.
        self._thread = threading.Thread(target=_help, args=(self._queue,), name="bngrad-copy", daemon=True)
        self._end = weakref.finalize(self, self._queue.put, None)
        self._core = -1

    def copy(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Copies, for each pair, the second array to the first; both have one dtype and shape, and are in C order."""
        nbytes = sum(target.nbytes for target, _ in pairs)
        if nbytes < _ALONE_BELOW_NBYTES:
            for pair in pairs:
                np.copyto(*pair)
            return
        pages = math.ceil(nbytes / mmap.PAGESIZE / (_PIECES if nbytes <= _WHOLE_ABOVE_NBYTES else 1))
        copies = _Copies(pairs, pages * mmap.PAGESIZE)
        if self._has_thread():
            if (core := _core_of_caller()) != self._core:
                self._keep_off(core)
            self._queue.put(copies)
        try:
            copies.make()
        finally:
            copies.finish()

    def close(self) -> None:
        """Ends the thread; copies are still made, without it."""
        self._end()

    def _has_thread(self) -> bool:
        if self._thread.ident is None and self._end.alive:
            with self._mutex:
                if self._thread.ident is None:
                    held_back(self._start)
        return self._thread.ident is not None and self._end.alive

    def _start(self) -> None:
        with contextlib.suppress(RuntimeError):  # the system has no more threads
            self._thread.start()

    def _keep_off(self, core: int) -> None:
        """Has the thread run on other cores than the caller, where Linux often wakes it, and it could not help."""
        if (native_id := self._thread.native_id) is not None:  # it is not just starting
            with contextlib.suppress(OSError):  # there is no other core, or a sandbox forbids it
                os.sched_setaffinity(native_id, os.sched_getaffinity(0) - {core})
            self._core = core


class _Copies:
    """Pieces of arrays that are still to be copied: each thread takes the next one, so that both end together."""

    def __init__(self, pairs: Sequence[tuple[Array, Array]], piece_nbytes: int) -> None:
        self._piece_nbytes = piece_nbytes
        self._arrays = [
            (_bytes_of(target), _bytes_of(source), iter(range(0, target.nbytes, piece_nbytes)))
            for target, source in pairs
        ]
        self._helping = threading.Lock()
        self._failure: BaseException | None = None

    def make(self) -> None:
        """Copies until no piece is left."""
        for target, source, begins in self._arrays:
            for begin in begins:  # which both threads share
                end = begin + self._piece_nbytes
                np.copyto(target[begin:end], source[begin:end])

    def help(self) -> None:
        """Copies in another thread."""
        with self._helping:
            try:
                self.make()
            except BaseException as error:  # such as a MemoryError: that piece was not copied
                self._failure = error.with_traceback(None)  # whose frames refer to the arrays

    def finish(self) -> None:
        """Waits, after `make`, for the other thread's last piece, but not for a thread that has yet to begin.

        Forgets the arrays: the queue may hold this for longer.
        """
        with self._helping:
            self._arrays.clear()
        if self._failure is not None:
            raise self._failure


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _help(queue: SimpleQueue[_Copies | None]) -> None:
    while (copies := queue.get()) is not None:
        copies.help()
