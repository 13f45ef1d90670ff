"""Threads as many as are needed, and no longer than that."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_IDLE_S = 1.0


class Threads:
    """Runs actions at once, in threads that end when they had nothing to do for a while."""

    def __init__(self, name: str) -> None:
        """Has no thread yet."""
        self._name = name
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._all: set[threading.Thread] = set()

    def run(self, action: Callable[[], None]) -> None:
        """Has a thread run an action, which must not raise; by one caller at a time."""
        self._actions.put(action)
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._all.add(thread)
            thread.start()

    def join(self) -> None:
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
