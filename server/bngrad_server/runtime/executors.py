"""Executors of gRPC's handlers: in grpcio's pools, inline, and in threads on demand."""

from __future__ import annotations

import logging
import math
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

Action: TypeAlias = Callable[[], None]


class HandlerExecutor(futures.ThreadPoolExecutor):
    """Runs grpcio's handlers; if the system refuses a new thread, the call waits for one of the pool's.

    An exception would end the thread that serves the whole port of grpcio.
    """

    def __init__(self, most: int, name: str) -> None:
        """Starts one thread, so that there always is one; others end when they have been idle for a second."""
        super().__init__(most)
        self._pool = OnDemandExecutor(name, most, least=1)
        self._pool.submit(_do_nothing)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """See `concurrent.futures.Executor`."""
        future: futures.Future[Any] = futures.Future()
        call = partial(_run, future, partial(fn, *args, **kwargs))
        try:
            self._pool.submit(call)
        except RuntimeError as error:
            logger.error("a call waits for a thread: %s", error)
            self._pool.submit_later(call)
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
    """Runs actions, each in a thread of its own; idle threads are used again, and end after a second.

    The thread that was used last is used first, so that those that a burst has left end even if calls go on.
    """

    def __init__(self, name: str, most: float = math.inf, *, least: int = 0) -> None:
        """Starts no thread yet; with ``most`` of them, actions wait for one; the last ``least`` do not end."""
        self._name = name
        self._most = most
        self._least = least
        self._mutex = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._idle: list[queue.SimpleQueue[Action | None]] = []  # what each idle thread waits for
        self._waiting: deque[Action] = deque()
        self._closing = False

    @property
    def queue_size(self) -> int:
        """The number of actions that wait for a thread."""
        return len(self._waiting)

    def submit(self, action: Action) -> None:
        """Runs an action, which must not raise, in a thread.

        Raises:
            RuntimeError: The system refuses a new thread.
        """
        with self._mutex:
            if self._idle or len(self._threads) >= self._most:
                self._give(action)
                return
            actions: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, args=(actions,), name=self._name, daemon=True)
            thread.start()
            self._threads.add(thread)
            actions.put(action)

    def submit_later(self, action: Action) -> None:
        """Runs an action, which must not raise, in one of the threads that there are."""
        with self._mutex:
            self._give(action)

    def shutdown(self, *, wait: bool = True) -> None:
        """Ends the threads after all actions, and waits for that; nothing may be submitted afterwards."""
        with self._mutex:
            self._closing = True
            threads = list(self._threads)
            while self._idle:
                self._idle.pop().put(None)
        if wait:
            for thread in threads:
                thread.join()

    def _give(self, action: Action) -> None:
        if self._idle:
            self._idle.pop().put(action)
        else:
            self._waiting.append(action)

    def _work(self, actions: queue.SimpleQueue[Action | None]) -> None:
        action = actions.get()
        while action is not None:
            action()
            del action  # which may hold a large message
            action = self._next(actions)

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
                if actions in self._idle and len(self._threads) > self._least:
                    self._idle.remove(actions)
                    self._threads.discard(threading.current_thread())
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


def _do_nothing() -> None:
    pass
