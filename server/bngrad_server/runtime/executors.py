"""Executors of gRPC's handlers: in grpcio's pools, inline, and in threads on demand."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

logger = logging.getLogger(__name__)

_IDLE_S = 1.0


class HandlerExecutor(futures.ThreadPoolExecutor):
    """Runs grpcio's handlers; if the system refuses a new thread, the call waits for one of the pool's.

    An exception would end the thread that serves the whole port of grpcio.
    """

    def __init__(self, most: int, name: str) -> None:
        """Starts one thread, so that there always is one."""
        super().__init__(most, thread_name_prefix=name)
        self.submit(int)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """See `concurrent.futures.Executor`; without a new thread, the future never completes."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:  # raised after the call was queued
            logger.error("a call waits for a thread: %s", error)
            return futures.Future()

    @property
    def queue_size(self) -> int:
        """The number of calls that wait for a thread."""
        return self._work_queue.qsize()


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
    """Runs actions at once, each in a thread of its own; idle threads are used again, and end after a second."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: set[threading.Thread] = set()

    def submit(self, action: Callable[[], None]) -> None:
        """Runs an action, which must not raise, in a thread; must not be called by two threads at once.

        Raises:
            RuntimeError: The system refuses a new thread.
        """
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()
            self._threads.add(thread)
        self._actions.put(action)

    def shutdown(self) -> None:
        """Waits for all actions, and ends the threads; nothing may be submitted afterwards."""
        threads = list(self._threads)
        for _ in threads:
            self._actions.put(None)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while True:
            try:
                action = self._actions.get(timeout=_IDLE_S)
            except queue.Empty:
                if self._idle.acquire(blocking=False):
                    self._threads.discard(threading.current_thread())
                    return
                continue  # an action was given to this thread at this moment
            if action is None:
                return
            action()
            self._idle.release()
