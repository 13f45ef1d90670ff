"""How a client chooses a server: the SDK's way and others, on what one client knows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bngrad._balancing.load_balancer import NEWEST_PART
from bngrad._balancing.subset import SUBSET_SIZE
from bngrad._balancing.upstream import CLOSE_TO_BEST, FRESH_S, MAX_COMPARED, is_fresh
from bngrad_wire.load_report import LoadReport

RECENT_S = 1.0
"""How long the requests in a server count that it reported to a client of `two_choices`."""


@dataclasses.dataclass(slots=True)
class Known:
    """What a client knows of a server that it has called.

    Attributes:
        in_flight: Its own calls there.
        report: The last report of the server.
        capacity: The requests per second that the server could compute, as it reported.
        reported_at: When that was.
        calls_at_report: How many calls the client had made by then.
    """

    in_flight: int = 0
    report: LoadReport | None = None
    capacity: float | None = None
    reported_at: float = 0.0
    calls_at_report: int = 0
    _counted_at: float = 0.0
    _calls_s: float = 0.0

    def count(self, calls: int, now: float) -> None:
        """Adds to the calls in flight."""
        self._calls_s += self.in_flight * (now - self._counted_at)
        self._counted_at = now
        self.in_flight += calls

    def note(self, report: LoadReport, now: float, calls: int) -> float | None:
        """Takes a new report into account; returns what part of the requests there were this client's, if known."""
        self.count(0, now)
        own = self._calls_s / max(now - self.reported_at, 1e-9)
        self.reported_at, self._calls_s = now, 0.0
        self.report, self.capacity, self.calls_at_report = report, report.capacity, calls
        return min(own / report.requests, 1.0) if report.requests > 0 else None


NOTHING = Known()


class View:
    """What one client knows.

    Attributes:
        known: The servers that it has called, by number.
        usual: The usual capacity of a server; 1 before any report.
        others: What part of the requests in the servers are those of other clients.
        calls: How many calls it has made.
        turn: The number of its calls, from a random one.
    """

    def __init__(self, rng: random.Random) -> None:
        self.known: dict[int, Known] = {}
        self.usual = 1.0
        self.others = 0.0
        self.calls = 0
        self.turn = rng.randrange(1 << 20)

    def note(self, server: int, report: LoadReport, now: float) -> None:
        """Takes the report of an answer into account, if it is a new one."""
        known = self.known[server]
        if report is known.report:
            return
        own = known.note(report, now, self.calls)
        if own is not None:
            self.others += NEWEST_PART * (1 - own - self.others)
        if report.capacity is not None:
            first = self.usual == 1.0
            self.usual = report.capacity if first else self.usual + NEWEST_PART * (report.capacity - self.usual)


Choice = Callable[[View, Sequence[int], float, random.Random], int]
"""Takes what the client knows, the servers that it may call, the time, and a source of chance."""


def _weighted(view: View, servers: Sequence[int], now: float, rng: random.Random, *, remembers: bool) -> int:
    count = len(servers)
    if count > MAX_COMPARED:
        servers = rng.sample(servers, MAX_COMPARED)
    known, usual, others = view.known, view.usual, view.others
    costs = []
    for server in servers:
        seen = known.get(server, NOTHING)
        ahead = seen.in_flight + 1.0
        if others:
            ahead += others * (rng.expovariate(1.0) - 1.0)
        age_s = now - seen.reported_at
        is_known = is_fresh(age_s, view.calls - seen.calls_at_report, count) if remembers else age_s < FRESH_S
        costs.append(ahead / ((seen.capacity if is_known else None) or usual))
    limit = min(costs) * CLOSE_TO_BEST
    good = [server for server, cost in zip(servers, costs, strict=True) if cost <= limit]
    return good[0] if len(good) == 1 else rng.choice(good)


def weighted(view: View, servers: Sequence[int], now: float, rng: random.Random) -> int:
    """The SDK's: where a call ends first, by own calls and reported speed; random by speed if others' calls prevail."""
    return _weighted(view, servers, now, rng, remembers=True)


def weighted_for_shorter(view: View, servers: Sequence[int], now: float, rng: random.Random) -> int:
    """The same, but speeds are always forgotten after three seconds."""
    return _weighted(view, servers, now, rng, remembers=False)


def fewest_in_flight(view: View, servers: Sequence[int], now: float, rng: random.Random) -> int:
    """The server with the fewest calls of this client: what the SDK did without reports."""
    if len(servers) > MAX_COMPARED:
        servers = rng.sample(servers, MAX_COMPARED)
    counts = [view.known.get(server, NOTHING).in_flight for server in servers]
    fewest = min(counts)
    return rng.choice([server for server, count in zip(servers, counts, strict=True) if count == fewest])


def round_robin(view: View, servers: Sequence[int], now: float, rng: random.Random) -> int:
    """One after the other; clients begin at random."""
    view.turn += 1
    return servers[view.turn % len(servers)]


def two_choices(view: View, servers: Sequence[int], now: float, rng: random.Random) -> int:
    """Of two random servers the one with fewer requests, as it reported within the last second, or of its own."""

    def load(server: int) -> float:
        known = view.known.get(server, NOTHING)
        is_recent = known.report is not None and now - known.reported_at < RECENT_S
        return max(
            known.report.requests if is_recent and known.report else 0.0,
            known.in_flight,
        )

    if len(servers) == 1:
        return servers[0]
    first, second = rng.sample(servers, 2)
    return first if load(first) <= load(second) else second


class Balancing(NamedTuple):
    """A way to balance.

    Attributes:
        choose: The choice of the server of a call.
        subset: How many servers a client uses, drawn for each client; None for all.
    """

    choose: Choice
    subset: int | None = None


BALANCINGS: dict[str, Balancing] = {
    "weighted": Balancing(weighted, SUBSET_SIZE),
    "weighted, 3 s": Balancing(weighted_for_shorter, SUBSET_SIZE),
    "weighted, all servers": Balancing(weighted),
    "fewest in flight": Balancing(fewest_in_flight),
    "round robin": Balancing(round_robin),
    "two choices": Balancing(two_choices),
}
