"""Lets a few calls run at a time, and the others wait."""

from __future__ import annotations

import threading

from bngrad._deadline import Cancellation, Deadline


class NoTurnError(Exception):
    """A call was cancelled, or half of its time has passed, before its turn had come."""


class Turns:
    """A number of calls have a turn at a time; the others wait, and have theirs in the order in which they came.

    A call waits for half of its time at most, since it must then still be answered.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._mutex = threading.Lock()
        self._waiting: dict[threading.Event, None] = {}  # oldest first

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    def take(self, deadline: Deadline, cancellation: Cancellation) -> None:
        """Waits for a turn, which lasts until `give_back`.

        Raises:
            NoTurnError: It has not come.
        """
        with self._mutex:
            if self._free:
                self._free -= 1
                return
            woken = threading.Event()
            self._waiting[woken] = None
        remaining_s = deadline.remaining_s()
        try:
            with cancellation.calls(woken.set):
                woken.wait(None if remaining_s is None else remaining_s / 2)
        except BaseException:
            if not self._leave(woken):
                self.give_back()
            raise
        if self._leave(woken):
            raise NoTurnError

    def give_back(self) -> None:
        """Ends a turn, and gives it to the call that has waited longest."""
        with self._mutex:
            if self._waiting:
                woken = next(iter(self._waiting))
                del self._waiting[woken]
                woken.set()
            else:
                self._free += 1

    def _leave(self, woken: threading.Event) -> bool:
        """Ends the wait of a call; returns False if its turn has come."""
        with self._mutex:
            if woken not in self._waiting:
                return False
            del self._waiting[woken]
            return True
