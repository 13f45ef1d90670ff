"""What ends a call: its deadline, another thread, and Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")

_LONGEST_TIMEOUT_S = 10 * 365 * 86400.0
"""Longer ones overflow gRPC's clock."""
_LOOK_S = 0.05
"""How often a call that waits for a lock looks whether it was cancelled."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a call must have ended.

    Attributes:
        timeout: The seconds that the call was given.
        at: On the monotonic clock; None for never.
    """

    timeout: float
    at: float | None

    @classmethod
    def after(cls, timeout: float) -> Deadline:
        """Returns the deadline of a call that starts now."""
        endless = timeout > _LONGEST_TIMEOUT_S or math.isinf(timeout)
        return cls(timeout, None if endless else time.monotonic() + timeout)

    def remaining_s(self) -> float | None:
        """Returns the seconds that are left, at least 1 ms; None for no limit."""
        return None if self.at is None else max(self.at - time.monotonic(), 1e-3)

    def allows(self, seconds: float) -> bool:
        """Returns whether the deadline is more than this many seconds away."""
        return self.at is None or time.monotonic() + seconds < self.at


ENDLESS = Deadline(math.inf, None)


class Cancellation:
    """Lets one thread end a call that runs in another.

    Attributes:
        only_by_close: Whether only the client's own `close` cancels.
        cancelled: Whether `cancel` was called.
        thread: The thread that makes the call, once one does.
    """

    def __init__(self, *, only_by_close: bool = False) -> None:
        self.only_by_close = only_by_close
        self.cancelled = False
        self.thread: int | None = None
        self._mutex = threading.Lock()
        self._callback: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Ends the call; may be called from any thread."""
        with self._mutex:
            self.cancelled = True
            # Within the mutex, so that the callback cannot run after its block has ended.
            if self._callback is not None:
                self._callback()

    def attach(self, callback: Callable[[], object]) -> None:
        """Has `cancel` call back until `detach`; calls back at once if it was cancelled before."""
        with self._mutex:
            self._callback = callback
            cancelled = self.cancelled
        if cancelled:
            callback()

    def detach(self) -> None:
        """Ends `attach`: after this, the callback does not run."""
        with self._mutex:
            self._callback = None

    @contextmanager
    def calls(self, callback: Callable[[], object]) -> Iterator[None]:
        """Has `cancel` call back during the block; calls back at once if it was cancelled before."""
        self.attach(callback)
        try:
            yield
        finally:
            self.detach()

    def sleep(self, seconds: float) -> None:
        """Waits for this long, or until `cancel` is called."""
        woken = threading.Event()
        with self.calls(woken.set):
            woken.wait(min(seconds, threading.TIMEOUT_MAX))


def acquire(lock: threading.RLock, deadline: Deadline, cancellation: Cancellation) -> bool:
    """Waits for a lock; returns False if the call was cancelled, or its deadline has passed, before that.

    The caller's ``try`` begins before, and tries to release the lock in any case: Ctrl-C may come once it is held. That
    needs a lock that only its owner can release.
    """
    while True:
        remaining_s = deadline.remaining_s()
        if lock.acquire(timeout=_LOOK_S if remaining_s is None else min(remaining_s, _LOOK_S)):
            return True
        if cancellation.cancelled or not deadline.allows(0):
            return False


def held_back(begin: Callable[[], Result]) -> Result:
    """Calls a function, which must be short, and returns its result; a SIGINT that comes meanwhile takes effect after.

    No context manager: an error that the handler of another signal raises between two of its methods would leave SIGINT
    held back for good.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        return begin()  # Python handles signals in the main thread alone; or the system ignores it, or ends the process
    came: list[tuple[int, FrameType | None]] = []
    is_held_back = True

    def hold(number: int, frame: FrameType | None) -> None:
        if is_held_back:
            came.append((number, frame))
        else:  # an error of another handler has kept `restore` from its work
            handler(number, frame)

    def restore() -> None:
        if signal.getsignal(signal.SIGINT) is hold:
            signal.signal(signal.SIGINT, handler)

    try:
        # Where a program embeds Python, the main thread may be of another interpreter, or another thread.
        with suppress(ValueError):
            signal.signal(signal.SIGINT, hold)
        return begin()
    finally:
        is_held_back = False
        try:
            restore()
        except BaseException:
            restore()
            raise
        finally:
            if came:
                handler(*came[0])
