"""Shares a limited amount among clients, so that none keeps the others from it."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager

import grpc

from bngrad_server.errors import OverloadedError


def is_fair(taken: int, amount: int, free: int) -> bool:
    """Whether a client may take an amount more of what is free: a client's share is at most twice what it leaves."""
    rest = free - amount
    return taken + amount <= 2 * rest if taken else rest >= 0


class FairShares:
    """An amount of which calls take parts, and wait for them while their client has its share.

    Shares are those of `is_fair`. So something is left for a client that has nothing yet; of the clients that wait, the
    one that has least is served first.
    """

    def __init__(
        self,
        what: str,
        total: int,
        max_waiting: float = math.inf,
        is_worthwhile: Callable[[str], bool] = lambda client: True,
    ) -> None:
        """Shares ``total``.

        Args:
            what: What is shared, for messages.
            total: How much there is.
            max_waiting: How many calls may wait; beyond, the latest of the client that has most of them is refused.
            is_worthwhile: Whether a client may have a part now; after it has become so, `serve` must be called.
        """
        self._what = what
        self._total = self._free = total
        self._max_waiting = max_waiting
        self._is_worthwhile = is_worthwhile
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, list[_Waiting]] = {}  # by client, oldest first
        self._mutex = threading.Lock()

    def part(
        self, client: str, amount: int, context: grpc.ServicerContext, timeout_s: float | None = None
    ) -> AbstractContextManager[None]:
        """Takes a part until the block ends; one of more than the total is given when all is free.

        Raises:
            OverloadedError: Too many calls wait, or the timeout has passed.
            CancelledError: The call has ended.
        """
        part = _Part(self, client, amount)
        waiting = self._take_or_wait(client, amount)
        if waiting is not None:
            self._wait(client, waiting, context, timeout_s)
        return part

    def give_back(self, client: str, amount: int) -> None:
        """Ends a part."""
        with self._mutex:
            self._free += amount
            self._taken[client] -= amount
            if not self._taken[client]:
                del self._taken[client]
            self._serve()

    def serve(self) -> None:
        """Gives parts to calls that wait and may have them now."""
        with self._mutex:
            self._serve()

    def _take_or_wait(self, client: str, amount: int) -> _Waiting | None:
        with self._mutex:
            if client not in self._waiting and self._fits(client, amount):
                self._take(client, amount)
                return None
            waiting = _Waiting(amount)
            self._waiting.setdefault(client, []).append(waiting)
            if sum(map(len, self._waiting.values())) > self._max_waiting:
                crowded = max(self._waiting, key=lambda client: len(self._waiting[client]))
                refused = self._waiting[crowded][-1]
                self._forget(crowded, refused)
                refused.over.set()
            return waiting

    def _wait(self, client: str, waiting: _Waiting, context: grpc.ServicerContext, timeout_s: float | None) -> None:
        try:
            if context.add_callback(waiting.over.set):
                waiting.over.wait(timeout_s)
        except BaseException:  # such as for a lack of memory
            if self._was_served(client, waiting):
                self.give_back(client, waiting.amount)
            raise
        if self._was_served(client, waiting):
            return
        if not context.is_active():
            raise CancelledError
        raise OverloadedError(f"this client has its share of the {self._what}")

    def _was_served(self, client: str, waiting: _Waiting) -> bool:
        """Ends a wait, and returns whether it got its part."""
        with self._mutex:
            if not waiting.is_served:
                self._forget(client, waiting)
                self._serve()  # the client's next call may need less
            return waiting.is_served

    def _fits(self, client: str, amount: int) -> bool:
        if not self._is_worthwhile(client):
            return False
        if self._free == self._total:
            return True
        return is_fair(self._taken[client], amount, self._free)

    def _take(self, client: str, amount: int) -> None:
        self._free -= amount
        self._taken[client] += amount

    def _serve(self) -> None:
        """Gives parts to those that wait, as far as they fit."""
        while self._waiting:
            clients = sorted(self._waiting, key=lambda client: self._taken[client])
            client = next((client for client in clients if self._fits(client, self._waiting[client][0].amount)), None)
            if client is None:
                return
            first = self._waiting[client][0]
            self._forget(client, first)
            self._take(client, first.amount)
            first.is_served = True
            first.over.set()

    def _forget(self, client: str, waiting: _Waiting) -> None:
        calls = self._waiting.get(client, [])
        if waiting in calls:
            calls.remove(waiting)
            if not calls:
                del self._waiting[client]


class _Part(AbstractContextManager[None]):
    """A part, given back at the end of a block."""

    __slots__ = ("_part",)

    def __init__(self, shares: FairShares, client: str, amount: int) -> None:
        self._part = shares, client, amount

    def __exit__(self, *error: object) -> None:
        shares, client, amount = self._part
        shares.give_back(client, amount)


class _Waiting:
    """A call that waits for a part.

    Attributes:
        over: Set when it is served, refused or ended.
    """

    __slots__ = ("amount", "is_served", "over")

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self.is_served = False
        self.over = threading.Event()
