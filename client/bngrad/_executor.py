"""Threads that make the blocking calls of the asynchronous client."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class DaemonExecutor(Executor):
    """A ``ThreadPoolExecutor`` of daemon threads: the interpreter does not wait for them at exit."""

    def __init__(self, max_workers: int, thread_name: str) -> None:
        """Starts no thread yet."""
        self._threads = _Threads(max_workers, thread_name)
        self._mutex = threading.Lock()
        self._end = weakref.finalize(self, self._threads.end)  # also if it is never shut down

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
            self._threads.run(partial(_run, future, call))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once all submitted calls are done; does not wait for that."""
        with self._mutex:
            self._end()


class _Threads:
    """The threads of an executor. They do not refer to it, so that it goes once its owner has forgotten it.

    One thread starts at a time, and has the next one started if need be: to start many takes a busy process long, in
    which an event loop that submits many calls would not run.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._count = 0
        self._free = 0  # idle threads, less the calls that wait for one
        self._is_starting = False

    def run(self, call: Callable[[], None]) -> None:
        """Has a thread make a call.

        Raises:
            RuntimeError: The system has no thread for it.
        """
        with self._mutex:
            self._free -= 1
        try:
            self._start_one()
        except RuntimeError:
            with self._mutex:
                self._free += 1
            raise
        self._calls.put(call)

    def end(self) -> None:
        """Ends the threads once all calls are done."""
        self._calls.put(None)

    def _start_one(self) -> None:
        """Starts a thread if a call waits for one, there may be more, and none is starting.

        Raises:
            RuntimeError: The system has no thread, and there is no other one.
        """
        is_begun = False
        try:
            with self._mutex:
                if self._free >= 0 or self._count == self._most or self._is_starting:
                    return
                self._is_starting = is_begun = True
                self._count += 1
                self._free += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except BaseException as error:  # Ctrl-C may come, too
            if not is_begun:
                raise
            with self._mutex:
                self._is_starting = False
                self._count -= 1
                self._free -= 1
                if not self._count or not isinstance(error, RuntimeError):
                    raise

    def _work(self) -> None:
        call = self._calls.get()
        with self._mutex:
            self._is_starting = False
        self._start_one()
        while call is not None:
            call()
            del call  # frees its arguments before the next wait
            with self._mutex:
                self._free += 1
            call = self._calls.get()
        self._calls.put(None)  # for the other threads


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
