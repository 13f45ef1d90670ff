"""Lets a few calls run at a time, and the others wait."""

from __future__ import annotations

import math
import threading
import weakref

from bngrad._deadline import Cancellation, Deadline

_LOOK_S = 1.0
"""How often a call that waits looks whether its turn has come: Ctrl-C may have kept another call from waking it."""


class NoTurnError(Exception):
    """A call was cancelled, or half of its time has passed, before its turn had come."""


class Turn:
    """A call that has its turn, or waits for it."""

    woken: threading.Event | None = None
    """Set once its turn has come, or it was cancelled; None if the call does not wait."""


class Turns:
    """A number of calls have a turn at a time; the others wait, and have theirs in the order in which they came.

    A call waits for half of its time at most, since it must then still be answered.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # Oldest first; the first ones, `count` at most, have their turn. Ctrl-C may leave references to what has gone.
        self._calls: dict[weakref.ref[Turn], None] = {}

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return max(len(self._calls) - self._count, 0)

    def take(self, deadline: Deadline, cancellation: Cancellation) -> Turn:
        """Waits for a turn, which lasts until `give_back`, or until the object that is returned has gone.

        Raises:
            NoTurnError: It has not come.
        """
        turn = Turn()
        self._calls[weakref.ref(turn)] = None
        if len(self._calls) <= self._count:
            return turn
        woken = turn.woken = threading.Event()
        remaining_s = deadline.remaining_s()
        limit = Deadline.after(math.inf if remaining_s is None else remaining_s / 2)
        try:
            with cancellation.calls(woken.set):
                while turn not in self._first():
                    if cancellation.cancelled or not limit.allows(0):
                        raise NoTurnError
                    woken.wait(min(limit.remaining_s() or _LOOK_S, _LOOK_S))
        except BaseException:
            self.give_back(turn)
            raise
        turn.woken = None
        return turn

    def give_back(self, turn: Turn) -> None:
        """Ends a turn, and wakes the call that has waited longest."""
        self._calls.pop(weakref.ref(turn), None)
        if len(self._calls) >= self._count:
            for each in self._first():
                if (woken := each.woken) is not None:
                    woken.set()

    def _first(self) -> list[Turn]:
        """Returns the calls that have their turn."""
        first: list[Turn] = []
        for call in list(self._calls):  # a copy, since other threads change it
            if len(first) == self._count:
                break
            if (turn := call()) is None:
                self._calls.pop(call, None)
            else:
                first.append(turn)
        return first
