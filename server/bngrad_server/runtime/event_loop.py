"""An event loop: a thread that waits for many file descriptors, and runs the callbacks of those that are ready."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from bngrad_server.runtime.long_readers import LongReaders

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_MAX_EVENTS = 16
"""The most events of a round; then come ticks and the callbacks of `EventLoop.call_soon`."""
_MAX_CALLBACKS = 64
"""The most of these callbacks: the others wait for the next round."""
_MAX_LIMITED = 2
"""The most of both for a loop that may only use a share of a core, so that it often looks how much it has used."""
_MAX_COUNTED = 2048
"""The most descriptors that `EventLoop.count_ready` counts."""
_MAX_CREDIT_S = 0.002
"""How much such a loop may save up: for as long, other threads may wait for Python's lock, since it is released for too
short a time by short system calls."""

Callback = Callable[[], None]


class _CpuLimit:
    """Bounds the time that the calling thread computes, to a share of a core: it sleeps where it has used more."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit_s = _MAX_CREDIT_S
        self._checked_at = time.monotonic()
        self._used_s = time.thread_time()

    def check(self) -> None:
        now, used_s = time.monotonic(), time.thread_time()
        earned_s = (now - self._checked_at) * self._share
        self._credit_s = min(self._credit_s + earned_s, _MAX_CREDIT_S) - (used_s - self._used_s)
        self._checked_at, self._used_s = now, used_s
        if self._credit_s < 0:
            time.sleep(-self._credit_s / self._share)


class EventLoop:
    """The thread and its callbacks, which must not block.

    Methods that add, remove or change readers, and `has_events`, must be called by the thread itself, or before it is
    started; any thread may call the others.

    Attributes:
        after_events: Called after each round of events, before and after the callbacks of `call_soon`; returns the
            time, on the monotonic clock, at which it must be called again at the latest.
        on_tick: Called ten times a second.
        can_stop: Tells, after `stop`, whether the thread may end.
        rounds: How many rounds of events it has begun.
        busy_s: For how many seconds it did not wait, up to the round before.
    """

    def __init__(self, name: str, cpu_share: float | None = None) -> None:
        """Starts nothing yet; with a share, the thread computes for no more than this share of a core."""
        self.after_events: Callable[[], float] = lambda: float("inf")
        self.on_tick: Callback = lambda: None
        self.can_stop: Callable[[], bool] = lambda: True
        self.rounds = 0
        self.busy_s = 0.0
        self._ready: deque[Callback] = deque()
        self._background: deque[Callback] = deque()
        self._epoll = select.epoll()
        self._readers: dict[int, Callback] = {}
        self._priority_epoll = select.epoll()
        self._priority_readers: dict[int, Callback] = {}
        self._epoll.register(self._priority_epoll, select.EPOLLIN)
        self._long_readers = LongReaders()
        self._epoll.register(self._long_readers, select.EPOLLIN)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._cpu_share = cpu_share
        self._thread = threading.Thread(target=self._run_to_the_end, name=name, daemon=True)
        self.add_reader(self._waker, self._clear_waker)

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.get_ident() == self._thread.ident

    @property
    def is_alive(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread once `can_stop` allows it, and waits for that, at most for the timeout."""
        self.call_soon(self._begin_to_stop)
        self._thread.join(timeout_s)

    def call_soon(self, callback: Callback) -> None:
        """Runs a callback in the thread after the current events; any thread may call this."""
        self._ready.append(callback)
        self._wake()

    def call_in_background(self, callback: Callback) -> None:
        """Does as `call_soon`, but only one such callback runs in each round."""
        self._background.append(callback)
        self._wake()

    def _wake(self) -> None:
        if not self.is_current:
            with contextlib.suppress(OSError, ValueError):  # the loop has ended
                os.eventfd_write(self._waker, 1)

    def has_events(self) -> bool:
        """Whether callbacks wait for the thread, which must be the calling one."""
        return bool(self._ready or self._epoll.poll(0, 1))

    def count_ready(self) -> int:
        """Returns how many descriptors of `add_reader` wait for their callbacks; any thread may call this."""
        try:
            events = self._epoll.poll(0, _MAX_COUNTED)  # level-triggered, so it takes nothing from the thread
            long = self._long_readers.count_ready()
        except (OSError, ValueError):  # the loop has ended
            return 0
        return long + sum(fd in self._readers and fd != self._waker for fd, _ in events)

    def add_reader(self, fd: int, callback: Callback) -> None:
        """Runs the callback whenever the descriptor is readable, or its other end is closed."""
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = callback

    def await_end(self, fd: int, callback: Callback) -> None:
        """Does as `add_reader`, but runs the callback only when the other end is closed, whatever is unread."""
        self._epoll.register(fd, select.EPOLLRDHUP)
        self._readers[fd] = callback

    def expect(self, fd: int, *, readable: bool, writable: bool) -> None:
        """Runs the callback of a descriptor of `add_reader` when it is readable, writable, or either, from now on."""
        self._epoll.modify(fd, select.EPOLLIN * readable | select.EPOLLOUT * writable)

    def add_priority_reader(self, fd: int, callback: Callback) -> None:
        """Does as `add_reader`, but the callback runs before those of all other descriptors that are ready."""
        self._priority_epoll.register(fd, select.EPOLLIN)
        self._priority_readers[fd] = callback

    def remove_priority_reader(self, fd: int) -> None:
        """Undoes `add_priority_reader`, at the latest in the callback that closes the descriptor."""
        if self._priority_readers.pop(fd, None) is None:
            return
        with contextlib.suppress(OSError):  # it was closed
            self._priority_epoll.unregister(fd)

    def remove_reader(self, fd: int) -> None:
        """Undoes `add_reader`, at the latest in the callback that closes the descriptor."""
        if self._readers.pop(fd, None) is None:
            return
        if fd in self._long_readers:
            self._long_readers.remove(fd)
        else:
            with contextlib.suppress(OSError):  # it was closed
                self._epoll.unregister(fd)

    def expect_long(self, fd: int, owner: str) -> None:
        """Has a descriptor of `add_reader` wait for all others that are ready, and then for its owner's turn.

        So its callback may take long: a round of events runs one such callback at most.
        """
        if fd not in self._long_readers:
            self._long_readers.add(fd, owner)
            self._epoll.unregister(fd)

    def expect_brief(self, fd: int) -> None:
        """Undoes `expect_long`."""
        if fd in self._long_readers:
            self._epoll.register(fd, select.EPOLLIN)
            self._long_readers.remove(fd)

    def _run_to_the_end(self) -> None:
        while True:
            try:
                self._run()
            except MemoryError:  # the events are still there: the next round has them
                with contextlib.suppress(MemoryError):
                    logger.error("a round of the event loop found no memory", exc_info=True)
            else:
                return

    def _run(self) -> None:
        limit = None if self._cpu_share is None else _CpuLimit(self._cpu_share)
        max_events, max_callbacks = (_MAX_EVENTS, _MAX_CALLBACKS) if limit is None else (_MAX_LIMITED, _MAX_LIMITED)
        long_readers = self._long_readers.fileno()
        woken_at = time.monotonic()
        due = next_tick = woken_at + _TICK_S
        while self._background or not (self._stopping and self.can_stop()):
            now = time.monotonic()
            self.busy_s += now - woken_at
            timeout_s = 0.0 if self._ready or self._background else max(0.0, min(due, next_tick) - now)
            events = self._epoll.poll(timeout_s, max_events)
            woken_at = time.monotonic()
            self.rounds += 1
            for fd, _ in events:
                self._run_reader(fd)
            if (long_readers, select.EPOLLIN) in events:
                self._run_reader(self._long_readers.next())
            if time.monotonic() >= next_tick:
                _call(self.on_tick)
                next_tick = time.monotonic() + _TICK_S
            due = self._after_events()
            if self._ready:
                for _ in range(min(len(self._ready), max_callbacks)):
                    _call(self._ready.popleft())
                due = self._after_events()
            if self._background:
                _call(self._background.popleft())
                due = self._after_events()
            if limit is not None:
                limit.check()
        self._epoll.close()
        self._priority_epoll.close()
        self._long_readers.close()
        waker, self._waker = self._waker, -1
        os.close(waker)

    def _run_reader(self, fd: int | None) -> None:
        self._run_priority_readers()
        callback = None if fd is None else self._readers.get(fd)  # None if a callback before has removed it
        if callback is not None:
            _call(callback)

    def _run_priority_readers(self) -> None:
        most = -1 if self._cpu_share is None else _MAX_LIMITED
        if self._priority_readers and (events := self._priority_epoll.poll(0, most)):
            for fd, _ in events:
                if (callback := self._priority_readers.get(fd)) is not None:  # None if one before has removed it
                    _call(callback)
            self._after_events()

    def _after_events(self) -> float:
        try:
            return self.after_events()
        except Exception:
            logger.exception("the callback after events failed")
            return float("inf")  # the next tick calls it again

    def _clear_waker(self) -> None:
        os.eventfd_read(self._waker)

    def _begin_to_stop(self) -> None:
        self._stopping = True


def _call(callback: Callback) -> None:
    try:
        callback()
    except Exception:
        logger.exception("the callback %r failed", callback)
