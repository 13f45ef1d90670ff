"""What connections share evenly among those that open them: bounded numbers of places and of threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Member = TypeVar("Member")


def is_fair(taken: int, amount: int, free: int) -> bool:
    """Whether a client may take an amount more of what is free: a client's share is at most twice what it leaves."""
    rest = free - amount
    return taken + amount <= 2 * rest if taken else rest >= 0


class Places(Generic[Member]):
    """The connections that have a place, each with the client that it belongs to."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._clients: dict[Member, str] = {}

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def is_full(self) -> bool:
        """Whether there is no free place."""
        return len(self._clients) >= self.count

    def take(self, member: Member, client: str) -> None:
        """Gives a connection a place."""
        self._clients[member] = client

    def leave(self, member: Member) -> None:
        """Frees the place of a connection, if it has one."""
        self._clients.pop(member, None)

    def most_dispensable(self, candidates: Iterable[Member]) -> Member | None:
        """Returns the candidate whose client has most places; the first of several, and None of none."""
        places = Counter(self._clients.values())
        mine = [member for member in candidates if member in self._clients]
        return max(mine, key=lambda member: places[self._clients[member]], default=None)

    def to_give_up(self, client: str, idle: Iterable[Member], busy: Iterable[Member]) -> Member | None:
        """Returns the member to close for a new one of a client: one of the client with most places, if possible idle.

        A client with fewer places than the new one's loses none; a busy one is closed only for a client with fewer.
        """
        places = Counter(self._clients.values())
        own = places[client]
        candidates = [each for each in idle if each in self._clients and places[self._clients[each]] >= own]
        candidates += [each for each in busy if each in self._clients and places[self._clients[each]] > own]
        return self.most_dispensable(candidates)


class ThreadShares(Generic[Member]):
    """Who has a thread, and who waits for one; it never blocks, for an event loop.

    Shares are those of `is_fair`. So a thread is left for a client that has none yet; of
    the clients that wait, the one that has fewest is served first.
    """

    def __init__(self, count: int, is_worthwhile: Callable[[str], bool] = lambda client: True) -> None:
        """Shares ``count`` threads among clients; one for which it is not worthwhile now gets none."""
        self._free = count
        self._is_worthwhile = is_worthwhile
        self._having: dict[Member, str] = {}
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, dict[Member, None]] = {}  # by client, oldest first

    def take(self, member: Member, client: str) -> bool:
        """Takes a thread for a client's member and returns True, or lets it wait for one."""
        if client not in self._waiting and self._fits(client):
            self._take(member, client)
            return True
        self._waiting.setdefault(client, {})[member] = None
        return False

    def leave(self, member: Member, client: str) -> None:
        """Gives a member's thread back, or ends its wait; does nothing if it has neither."""
        if self._having.pop(member, None) is not None:
            self._free += 1
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]
        elif client in self._waiting:
            self._forget(member, client)

    def serve_next(self) -> Member | None:
        """Takes a thread for the next one that waits, and returns it; None if there is none for it."""
        clients = sorted(self._waiting, key=lambda client: self._taken[client])
        client = next(filter(self._fits, clients), None)
        if client is None:
            return None
        member = next(iter(self._waiting[client]))
        self._forget(member, client)
        self._take(member, client)
        return member

    @property
    def is_waited_for(self) -> bool:
        """Whether anyone waits."""
        return bool(self._waiting)

    @property
    def waiting(self) -> Iterator[Member]:
        """Those that wait."""
        return (member for members in self._waiting.values() for member in members)

    def _fits(self, client: str) -> bool:
        return self._is_worthwhile(client) and is_fair(self._taken[client], 1, self._free)

    def _take(self, member: Member, client: str) -> None:
        self._free -= 1
        self._taken[client] += 1
        self._having[member] = client

    def _forget(self, member: Member, client: str) -> None:
        members = self._waiting[client]
        members.pop(member, None)
        if not members:
            del self._waiting[client]
