"""Executors of gRPC's handlers: in grpcio's pools, inline, and in threads on demand."""

from __future__ import annotations

import logging
import math
import mmap
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
_ROOM_NBYTES = 16 * 2**20
"""More than a new thread takes: 8 MiB for its stack, unless the system is told otherwise."""

Action: TypeAlias = Callable[[], None]


class HandlerExecutor(futures.ThreadPoolExecutor):
    """Runs grpcio's handlers in an `OnDemandExecutor`, which raises nothing where the system refuses a new thread.

    An exception would end the thread that serves the whole port of grpcio.
    """

    def __init__(self, most: int, name: str) -> None:
        """Starts the first of at most ``most`` threads."""
        super().__init__(most)
        self._pool = OnDemandExecutor(name, most)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """See `concurrent.futures.Executor`."""
        future: futures.Future[Any] = futures.Future()
        self._pool.submit(partial(_run, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor`; no call is cancelled."""
        self._pool.shutdown(wait=wait)

    @property
    def queue_size(self) -> int:
        """The number of calls that wait for a thread."""
        return self._pool.queue_size


class InlineExecutor(futures.ThreadPoolExecutor):
    """Runs handlers in the calling thread, so that a refusal neither takes a thread nor waits for one."""

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """See `concurrent.futures.Executor`."""
        done: futures.Future[Any] = futures.Future()
        done.set_result(fn(*args, **kwargs))
        return done


class OnDemandExecutor:
    """Runs actions, each in a thread of its own; idle threads are used again, and all but one end after a second.

    The thread that was used last is used first, so that those that a burst has left end even if calls go on. Threads
    are started by threads of the executor: on a busy server that takes milliseconds, for which `submit` must not wait.
    """

    def __init__(self, name: str, most: float = math.inf) -> None:
        """Starts the first of at most ``most`` threads.

        Raises:
            RuntimeError: The system refuses it.
            OSError: There is no memory for it.
        """
        self._name = name
        self._most = most
        self._mutex = threading.Lock()
        self._threads: set[threading.Thread] = set()  # but for one that is starting
        self._count = 1
        self._idle: list[queue.SimpleQueue[Action | None]] = []  # what each idle thread waits for
        self._waiting: deque[Action] = deque()
        self._is_starting = False
        self._closing = False
        self._start_thread()

    @property
    def queue_size(self) -> int:
        """The number of actions that wait for a thread."""
        return len(self._waiting)

    def submit(self, action: Action) -> None:
        """Runs an action, which must not raise, in a thread; if the system refuses a new one, in one that there is."""
        with self._mutex:
            if self._idle:
                self._idle.pop().put(action)
            else:
                self._waiting.append(action)

    def shutdown(self, *, wait: bool = True) -> None:
        """Ends the threads after all actions, and waits for that; nothing may be submitted afterwards."""
        with self._mutex:
            self._closing = True
            while self._idle:
                self._idle.pop().put(None)
        while wait and self._threads:  # those that end may have started others
            self._threads.pop().join()

    def _start_spare(self) -> None:
        """Starts a thread for the next action, unless one is idle."""
        with self._mutex:
            if self._idle or self._is_starting or self._closing or self._count >= self._most:
                return
            self._is_starting = True
            self._count += 1
        try:
            self._start_thread()
        except (RuntimeError, OSError) as error:
            with self._mutex:
                self._is_starting = False
                self._count -= 1
            logger.error("calls may have to wait for a thread: %s", error)

    def _start_thread(self) -> None:
        # Without memory for its first steps, a new thread ends before Python knows of it, and `start` waits for ever.
        mmap.mmap(-1, _ROOM_NBYTES).close()
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        thread.start()
        self._threads.add(thread)

    def _work(self) -> None:
        actions: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._is_starting = False
        while (action := self._next(actions)) is not None:
            self._start_spare()
            action()
            del action  # which may hold a large message

    def _next(self, actions: queue.SimpleQueue[Action | None]) -> Action | None:
        """Waits for what the calling thread is to run next; None if it is to end."""
        with self._mutex:
            if self._waiting:
                return self._waiting.popleft()
            if self._closing:
                return None
            self._idle.append(actions)
        while True:
            with suppress(queue.Empty):
                return actions.get(timeout=_IDLE_S)
            with self._mutex:
                if actions in self._idle and len(self._idle) > 1:
                    self._idle.remove(actions)
                    self._threads.discard(threading.current_thread())
                    self._count -= 1
                    return None


def _run(future: futures.Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
            del future, call  # the error refers to this frame
        else:
            future.set_result(result)
