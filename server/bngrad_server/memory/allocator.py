"""Hands out memory to clients: at once where it is free, else in an order that is fair to those that wait.

The order is that of fair queueing, as in `bngrad_server.scheduling.fair_queue`, with work counted in bytes: each client
has a clock, which its requests advance by their size, and the request whose turn ends first goes first. A request that
does not fit lets later ones pass, until these amount to its own size; from then on memory is kept for it.

Small requests take the reserve first, which is memory in addition. So they rarely wait for large ones, and do not cut
up the memory that a large one needs.

A client that lost transfers lately may have a part of the memory only; see `bngrad_server.memory.lost_transfers`.
"""

from __future__ import annotations

import bisect
import math
import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import NamedTuple

from bngrad_server.errors import RETRY_DELAY_S, ArenaTooSmallError, OverloadedError
from bngrad_server.memory.free_range import FreeRange
from bngrad_server.memory.layout import ALIGNMENT, aligned
from bngrad_server.memory.lost_transfers import LostTransfers

_CHECK_INTERVAL_S = 0.2
"""How often a thread that waits for memory checks whether its client is still there."""
_SMALL_FRACTION = 4
"""A small request takes at most one part in this many of what is free of the reserve, so smaller ones find some."""

_rank = operator.attrgetter("rank")


class Block(NamedTuple):
    """A piece of the memory, in bytes, and the client that has it."""

    offset: int
    nbytes: int
    client: str


class Usage(NamedTuple):
    """Who has memory, and who waits for it.

    Attributes:
        waiting: Client and size of each request that waits, the next one first.
        held: The bytes that each client has.
        shares: The bytes that each of these clients may keep while others wait.
        free: The bytes that large requests can still have, in one piece or several.
    """

    waiting: tuple[tuple[str, int], ...]
    held: Mapping[str, int]
    shares: Mapping[str, float]
    free: int


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits.

    Attributes:
        passed: The size of the later requests that got memory before it.
        block: What it gets.
        error: Why it gets none.
        granted: Is set once it has a block or an error.
    """

    client: str
    nbytes: int
    rank: int
    passed: int = 0
    block: Block | None = None
    error: OverloadedError | None = None
    granted: threading.Event = field(default_factory=threading.Event)


class Allocator:
    """Keeps account of memory; its offsets begin at 0, and those of the reserve at ``nbytes``.

    Attributes:
        nbytes: The size of the largest request, and of all requests together but for the reserve.
        reserve_nbytes: The size of the reserve.
    """

    def __init__(self, nbytes: int, reserve_nbytes: int = 0) -> None:
        self.nbytes = _round_up(nbytes)
        self.reserve_nbytes = aligned(reserve_nbytes)
        self._main = FreeRange(0, self.nbytes)
        self._reserve = FreeRange(self.nbytes, self.reserve_nbytes)
        self._held: Counter[str] = Counter()
        self._lost = LostTransfers(self.nbytes)
        self._mutex = threading.Lock()
        self._waiting: list[_Waiter] = []  # by rank
        self._clocks: dict[str, int] = {}
        self._clock = 0

    def allocate(
        self,
        nbytes: int,
        client: str,
        deadline: float | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
        make_room: Callable[[], bool] = lambda: False,
    ) -> Block:
        """Takes a block, waiting for memory where none is free.

        Args:
            nbytes: Its size.
            client: Who gets it.
            deadline: When to give up, on the monotonic clock; None means never.
            is_cancelled: Tells whether to give up at once.
            make_room: Frees some memory, rather than that the request waits; returns False if it cannot.

        Raises:
            ArenaTooSmallError: There is never as much.
            OverloadedError: The client lost transfers lately, and would have more than it may for now.
            TimeoutError: No memory became free in time.
            CancelledError: ``is_cancelled`` returned True.
        """
        nbytes = self._checked(nbytes)
        with self._mutex:
            if (block := self._take_at_once(nbytes, client)) is not None:
                return block
            waiter = self._enqueue(nbytes, client)
            self._grant()
        try:
            while waiter.block is None:
                if waiter.error is None and make_room():
                    continue
                rest_s = _CHECK_INTERVAL_S if deadline is None else min(_CHECK_INTERVAL_S, deadline - time.monotonic())
                if rest_s <= 0:
                    raise TimeoutError(f"no {nbytes} bytes of memory for tensors became free in time")
                if is_cancelled():
                    raise CancelledError
                waiter.granted.wait(rest_s)
                if waiter.error is not None:
                    raise waiter.error
        except BaseException:
            self._give_up(waiter)
            waiter.error = None  # its traceback has this frame: a reference cycle
            raise
        return waiter.block

    def allocate_at_once(self, nbytes: int, client: str) -> Block | None:
        """Takes a block without waiting; returns None if that is impossible, or unfair to those that wait.

        Raises:
            ArenaTooSmallError: There is never as much.
            OverloadedError: As in `allocate`.
        """
        nbytes = self._checked(nbytes)
        with self._mutex:
            return self._take_at_once(nbytes, client)

    def allocate_spare(self, nbytes: int, client: str) -> Block | None:
        """Takes a block of memory that no request needs now, for what can be given up when one does; else None.

        It is in the upper half, if that has room, the next after those before it: if blocks are freed in their order,
        what requests have in one piece grows.
        """
        nbytes = _round_up(nbytes)
        with self._mutex:
            offset = self._main.take_above(self.nbytes // 2, nbytes) if self._may_spare(client) else None
            return None if offset is None else self._taken(offset, nbytes, client)

    def may_spare(self, client: str) -> bool:
        """Whether `allocate_spare` gives a client memory if there is a piece of the size."""
        with self._mutex:
            return self._may_spare(client)

    def free(self, block: Block) -> None:
        """Takes a block back; to be called once for each block."""
        with self._mutex:
            self._put_back(block)
            if self._waiting:
                self._grant()

    def limit(self, client: str) -> None:
        """Limits a client for some time, since it lost a transfer; it waits no longer for more than it may have."""
        with self._mutex:
            self._lost.add(client)
            wanted = 0
            for waiter in [waiter for waiter in self._waiting if waiter.client == client]:
                waiter.error = self._excess(client, wanted + waiter.nbytes)
                if waiter.error is None:
                    wanted += waiter.nbytes
                else:
                    self._remove(waiter)
                    waiter.granted.set()
            self._grant()

    @property
    def used_bytes(self) -> int:
        """How many bytes are in use."""
        with self._mutex:
            return sum(self._held.values())

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits; cheaper than `usage`."""
        return bool(self._waiting)

    def usage(self) -> Usage:
        """Who has memory, and who waits for it."""
        with self._mutex:
            waiting = tuple((waiter.client, waiter.nbytes) for waiter in self._waiting)
            clients = {*self._held, *(client for client, _ in waiting)}
            share = self.nbytes / max(len(clients), 1)
            shares = {client: min(share, self._lost.keep(client, clients)) for client in clients}
            return Usage(waiting, dict(self._held), shares, self._main.free_nbytes)

    def _checked(self, nbytes: int) -> int:
        nbytes = _round_up(nbytes)
        if nbytes > self.nbytes:
            raise ArenaTooSmallError(
                f"the request needs {nbytes} bytes of memory for tensors, and the server has {self.nbytes}"
            )
        return nbytes

    def _excess(self, client: str, wanted: int) -> OverloadedError | None:
        """The error of a client that wants more, in addition to what it has, than it may have after its losses."""
        limit = self._lost.limit(client, self._held)
        if self._held[client] + wanted <= limit:
            return None
        reason = f"others needed memory that this client held; for now, it may have {limit} bytes of {self.nbytes}"
        if wanted <= limit:
            return OverloadedError(reason)
        return OverloadedError(reason, max(math.ceil(self._lost.rest_s(client)), RETRY_DELAY_S))

    def _may_spare(self, client: str) -> bool:
        return not self._waiting and not self._lost.rest_s(client)

    def _take_from_reserve(self, nbytes: int) -> int | None:
        return self._reserve.take(nbytes) if nbytes * _SMALL_FRACTION <= self._reserve.free_nbytes else None

    def _take_at_once(self, nbytes: int, client: str) -> Block | None:
        if self._lost and self._lost.rest_s(client):
            wanted = nbytes + sum(waiter.nbytes for waiter in self._waiting if waiter.client == client)
            error = self._excess(client, wanted)
            try:
                if error is not None:
                    raise error
            finally:
                del error  # its traceback has this frame: a reference cycle
        offset = self._take_from_reserve(nbytes)
        if offset is None and not self._waiting:
            offset = self._main.take(nbytes)
        return None if offset is None else self._taken(offset, nbytes, client)

    def _taken(self, offset: int, nbytes: int, client: str) -> Block:
        self._held[client] += nbytes
        return Block(offset, nbytes, client)

    def _put_back(self, block: Block) -> None:
        memory = self._main if block.offset < self.nbytes else self._reserve
        memory.put_back(block.offset, block.nbytes)
        self._held[block.client] -= block.nbytes
        if not self._held[block.client]:
            del self._held[block.client]

    def _enqueue(self, nbytes: int, client: str) -> _Waiter:
        rank = max(self._clocks.get(client, 0), self._clock) + nbytes
        self._clocks[client] = rank
        waiter = _Waiter(client, nbytes, rank)
        bisect.insort(self._waiting, waiter, key=_rank)
        return waiter

    def _grant(self) -> None:
        """Gives memory to those that wait, as far as it is free."""
        skipped: list[_Waiter] = []
        room: float = math.inf  # how much may still pass those that do not fit
        for waiter in list(self._waiting):
            nbytes = waiter.nbytes
            offset = self._take_from_reserve(nbytes)
            if offset is None and nbytes <= room and (offset := self._main.take(nbytes)) is not None:
                room -= nbytes
                for other in skipped:
                    other.passed += nbytes
            if offset is None:
                skipped.append(waiter)
                room = min(room, nbytes - waiter.passed)
                continue
            self._clock += nbytes // len({other.client for other in self._waiting})
            self._remove(waiter)
            waiter.block = self._taken(offset, nbytes, waiter.client)
            waiter.granted.set()

    def _give_up(self, waiter: _Waiter) -> None:
        with self._mutex:
            if waiter.block is not None:
                self._put_back(waiter.block)
            elif waiter.error is None:
                self._remove(waiter)
            self._grant()

    def _remove(self, waiter: _Waiter) -> None:
        self._waiting.remove(waiter)
        if not self._waiting:  # those that come later begin anew
            self._clocks.clear()


def _round_up(nbytes: int) -> int:
    """The next multiple of ALIGNMENT, but not 0, so that every block has its own address."""
    return max(ALIGNMENT, aligned(nbytes))
