"""Threads on demand."""

from __future__ import annotations

import logging
import mmap
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
_ROOM_NBYTES = 16 * 2**20
"""More than a new thread takes: 8 MiB for its stack, unless the system is told otherwise."""

Action: TypeAlias = Callable[[], None]


class OnDemandExecutor:
    """Runs actions, each in a thread of its own; idle threads are used again, and all but one end after a second.

    The thread that was used last is used first, so that those that a burst has left end even if calls go on. Threads
    are started by threads of the executor: on a busy server that takes milliseconds, for which `submit` must not wait.
    """

    def __init__(self, name: str) -> None:
        """Starts the first thread.

        Raises:
            RuntimeError: The system refuses it.
            OSError: There is no memory for it.
        """
        self._name = name
        self._mutex = threading.Lock()
        self._threads: set[threading.Thread] = set()  # but for one that is starting
        self._idle: list[queue.SimpleQueue[Action | None]] = []  # what each idle thread waits for
        self._waiting: deque[Action] = deque()
        self._is_starting = False
        self._closing = False
        self._start_thread()

    def submit(self, action: Action) -> None:
        """Runs an action, which must not raise, in a thread; if the system refuses a new one, in one that there is."""
        with self._mutex:
            if self._idle:
                self._idle.pop().put(action)
            else:
                self._waiting.append(action)

    def shutdown(self) -> None:
        """Ends the threads after all actions, and waits for that; nothing may be submitted afterwards."""
        with self._mutex:
            self._closing = True
            while self._idle:
                self._idle.pop().put(None)
        while self._threads:  # those that end may have started others
            self._threads.pop().join()

    def _start_spare(self) -> None:
        """Starts a thread for the next action, unless one is idle."""
        with self._mutex:
            if self._idle or self._is_starting or self._closing:
                return
            self._is_starting = True
        try:
            self._start_thread()
        except (RuntimeError, OSError) as error:
            with self._mutex:
                self._is_starting = False
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
                    return None
