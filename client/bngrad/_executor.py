"""Threads that make the blocking calls of the asynchronous client."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeAlias, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_Queue: TypeAlias = SimpleQueue[tuple[Callable[[], None], bool] | None]
"""What to run, and whether a thread is reserved for it; others wait for one."""


class DaemonExecutor(Executor):
    """A ``ThreadPoolExecutor`` of daemon threads: the interpreter does not wait for them at exit."""

    def __init__(self, max_workers: int, thread_name: str) -> None:
        """Starts no thread yet."""
        self._max_workers = max_workers
        self._thread_name = thread_name
        self._count = 0
        self._idle = threading.Semaphore(0)
        self._queue: _Queue = SimpleQueue()
        self._mutex = threading.Lock()
        self._end = weakref.finalize(self, self._queue.put, None)  # also if it is never shut down

    def submit(
        self, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Has a thread call a function.

        Raises:
            RuntimeError: The executor was shut down, or the system cannot start a thread.
        """
        future: Future[Result] = Future()
        call = partial(function, *args, **kwargs)
        with self._mutex:
            if not self._end.alive:
                raise RuntimeError("the executor was shut down")
            has_thread = self._idle.acquire(blocking=False) or self._start_thread()
            self._queue.put((partial(_run, future, call), has_thread))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once all submitted calls are done; does not wait for that."""
        with self._mutex:
            self._end()

    def _start_thread(self) -> bool:
        """Starts one more thread; returns False if there are as many as may be, or the system has no more."""
        if self._count == self._max_workers:
            return False
        thread = threading.Thread(target=_work, args=(self._queue, self._idle), name=self._thread_name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._count:
                raise
            return False
        self._count += 1
        return True


def _run(future: Future[Result], call: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks the cycle of the future, its error and this frame
    else:
        future.set_result(result)


def _work(queue: _Queue, idle: threading.Semaphore) -> None:
    while (item := queue.get()) is not None:
        run, was_reserved = item
        run()
        del item, run  # frees its arguments before the next wait
        if was_reserved:
            idle.release()
    queue.put(None)  # for the other threads
