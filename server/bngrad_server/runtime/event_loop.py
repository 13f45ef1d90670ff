"""A thread that waits for many file descriptors at once, and acts on whichever is ready."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_MAX_EVENTS = 16
"""Of a round; then there is a look at the time, and at what others want done."""

Action = Callable[[], None]


class EventLoop:
    """The thread, and what it is to do. Nothing that it does may wait.

    But for `call_soon`, all methods are for the thread itself, or for the time before it is started.

    Attributes:
        after_events: Called after each round of events, before what is to be done `call_soon`; gives the time, on the
            monotonic clock, at which it must be called again at the latest.
        on_tick: Called several times a second.
        can_stop: Asked, once the thread is to end, whether it may.
    """

    def __init__(self, name: str) -> None:
        """Watches nothing."""
        self.after_events: Callable[[], float] = lambda: float("inf")
        self.on_tick: Action = lambda: None
        self.can_stop: Callable[[], bool] = lambda: True
        self._epoll = select.epoll()
        self._actions: dict[int, Action] = {}
        self._urgent = select.epoll()
        self._urgent_actions: dict[int, Action] = {}
        self._epoll.register(self._urgent, select.EPOLLIN)
        self._ready: deque[Action] = deque()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.add_reader(self._waker, self._empty_waker)

    @property
    def is_alive(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Has the thread end as soon as `can_stop` allows, and waits for that, but not for ever."""
        self.call_soon(self._begin_to_stop)
        self._thread.join(timeout_s)

    def call_soon(self, action: Action) -> None:
        """Has the thread do something after the events that it is at, from any thread."""
        self._ready.append(action)
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                os.eventfd_write(self._waker, 1)

    def add_reader(self, fd: int, action: Action) -> None:
        """Has the action done whenever the descriptor is readable or its other end is gone."""
        self._epoll.register(fd, select.EPOLLIN)
        self._actions[fd] = action

    def add_priority_reader(self, fd: int, action: Action) -> None:
        """Does as `add_reader`, but however many others are ready, the action comes next."""
        self._urgent.register(fd, select.EPOLLIN)
        self._urgent_actions[fd] = action

    def remove_priority_reader(self, fd: int) -> None:
        """Undoes `add_priority_reader`."""
        del self._urgent_actions[fd]
        with contextlib.suppress(OSError):  # it was closed
            self._urgent.unregister(fd)

    def remove_reader(self, fd: int) -> None:
        """Watches a descriptor no longer; to be called at the latest in the action in which it is closed."""
        if self._actions.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # it was closed
                self._epoll.unregister(fd)

    def _run(self) -> None:
        next_tick = time.monotonic() + _TICK_S
        due = next_tick
        while not (self._stopping and self.can_stop()):
            patience_s = 0.0 if self._ready else max(0.0, min(due, next_tick) - time.monotonic())
            for fd, _ in self._epoll.poll(patience_s, _MAX_EVENTS):
                self._do_what_is_urgent()
                action = self._actions.get(fd)  # none where an action before has forgotten it
                if action is not None:
                    _do(action)
            if time.monotonic() >= next_tick:
                _do(self.on_tick)
                next_tick = time.monotonic() + _TICK_S
            due = self.after_events()
            if self._ready:
                # What these want done soon has its turn after others: a client that floods us must not keep them out.
                for _ in range(len(self._ready)):
                    _do(self._ready.popleft())
                due = self.after_events()
        self._close()

    def _do_what_is_urgent(self) -> None:
        if self._urgent_actions and (events := self._urgent.poll(0)):
            for fd, _ in events:
                _do(self._urgent_actions[fd])
            self.after_events()

    def _empty_waker(self) -> None:
        os.eventfd_read(self._waker)

    def _begin_to_stop(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        self._epoll.close()
        self._urgent.close()
        waker, self._waker = self._waker, -1
        os.close(waker)


def _do(action: Action) -> None:
    try:
        action()
    except Exception:
        logger.exception("%r failed", action)
