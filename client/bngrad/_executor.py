"""Threads for the calls of an event loop."""

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
_Queue: TypeAlias = SimpleQueue[Callable[[], None] | None]


class DaemonThreads(Executor):
    """Does as ``ThreadPoolExecutor``, but a Python that ends does not wait for what they do."""

    def __init__(self, most: int, name: str) -> None:
        """Begins no thread yet.

        Args:
            most: How many there may be.
            name: What they are called.
        """
        self._most = most
        self._name = name
        self._count = 0
        self._idle = threading.Semaphore(0)
        self._queue: _Queue = SimpleQueue()
        self._mutex = threading.Lock()
        self._end = weakref.finalize(self, self._queue.put, None)  # also where nobody shuts it down

    def submit(
        self, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Has a thread call a function.

        Raises:
            RuntimeError: It was shut down, or the system gives no thread.
        """
        future: Future[Result] = Future()
        call = partial(function, *args, **kwargs)
        with self._mutex:
            if not self._end.alive:
                raise RuntimeError("the threads were shut down")
            if not self._idle.acquire(blocking=False) and self._count < self._most:
                self._begin_thread()
            self._queue.put(partial(_run, future, call))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Has the threads end, without waiting, once they have done all that was submitted."""
        with self._mutex:
            self._end()

    def _begin_thread(self) -> None:
        thread = threading.Thread(target=_work, args=(self._queue, self._idle), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._count:
                raise
        else:
            self._count += 1


def _run(future: Future[Result], call: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
        del future  # it has the error, whose frames would have it, until garbage is collected
    else:
        future.set_result(result)


def _work(queue: _Queue, idle: threading.Semaphore) -> None:
    while (run := queue.get()) is not None:
        run()
        del run  # what it has is not to last until there is more to do
        idle.release()
    queue.put(None)  # for the other threads
