"""Threads as many as are needed, and no longer than that."""

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
    """What grpcio runs handlers in. Where the system has no more threads, a call waits for one of those that there are.

    Of an error, the thread that serves all of grpcio's port would end, and nobody would be answered any more.
    """

    def __init__(self, most: int, name: str) -> None:
        """Has one thread.

        Args:
            most: The most threads.
            name: The beginning of their names.
        """
        super().__init__(most, thread_name_prefix=name)
        self.submit(int)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """See `concurrent.futures.Executor`; where there is no new thread, the future is one that nobody ends."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:  # raised after it was put in line
            logger.error("a call waits for a thread: %s", error)
            return futures.Future()

    @property
    def queue_size(self) -> int:
        """How many calls wait for a thread."""
        return self._work_queue.qsize()


class InlineExecutor(futures.ThreadPoolExecutor):
    """Runs handlers that take no time where they are: who is refused must not take a thread, nor wait for one."""

    def __init__(self) -> None:
        """Has no thread."""
        super().__init__(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """See `concurrent.futures.Executor`."""
        done: futures.Future[Any] = futures.Future()
        done.set_result(fn(*args, **kwargs))
        return done


class OnDemandExecutor:
    """Runs actions at once, in threads that end when they had nothing to do for a while."""

    def __init__(self, name: str) -> None:
        """Has no thread yet."""
        self._name = name
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._all: set[threading.Thread] = set()

    def submit(self, action: Callable[[], None]) -> None:
        """Has a thread run an action, which must not raise; by one caller at a time.

        Raises:
            RuntimeError: The system has no thread for it.
        """
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()
            self._all.add(thread)
        self._actions.put(action)

    def shutdown(self) -> None:
        """Ends every thread once it has nothing to do; nothing may be run afterwards."""
        threads = list(self._all)
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
                    self._all.discard(threading.current_thread())
                    return
                continue  # an action was left to this thread just now
            if action is None:
                return
            action()
            self._idle.release()
