"""A discrete-event model: open-loop clients, servers with one queue each, servers that die and others that come.

A client that meets a dead server goes to another at once, as the SDK does; a server computes no request whose time is
over.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from benchmarks.fleet.balancing import BALANCINGS, Known, View

from bngrad_wire.load_report import LoadReport

LOOKUP_S = (4.0, 6.0)
"""How long after a look-up a client begins the next one: bngrad._balancing.resolver."""
AFTER_FAILURE_S = 1.0
"""The same after a failure."""
REPORT_INTERVAL_S = 0.2
REPORT_MEMORY_S = 2.0
"""How often a server makes a report, and what it averages over: bngrad_server.telemetry.load."""
REFUSED_S = 0.001
"""What a connection that is refused costs."""
NO_REPORT = LoadReport(0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        speeds: The speed of each server, in relation to the one that was measured.
        clients: How many clients there are.
        load: Requests offered, as a part of what all servers together can compute.
        service_s: Measured times that a server of speed 1 needs for a request; one is drawn for each request.
        overhead_s: What a call takes besides, such as its way through the network.
        balancing: A name of `BALANCINGS`.
        seconds: How long it lasts.
        warm_up_s: How much at the beginning does not count.
        timeout_s: The clients' timeout.
        lifetime_s: How long a server lives on average before it is killed; infinity for no churn.
        replaced_after_s: How long after that another one begins, at another address.
    """

    speeds: Sequence[float]
    clients: int
    load: float
    service_s: Sequence[float]
    overhead_s: float
    balancing: str
    seconds: float
    warm_up_s: float = 3.0
    timeout_s: float = 2.0
    lifetime_s: float = math.inf
    replaced_after_s: float = 5.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        offered: Requests.
        goodput: The part of them that was answered in time.
        p50_s: The median of the answered ones' times.
        p99_s: The 99th percentile.
        imbalance: How much busier the busiest tenth was than the average, of the servers that lived throughout.
        shares: The part of the answers by each speed of servers.
    """

    offered: int
    goodput: float
    p50_s: float
    p99_s: float
    imbalance: float
    shares: dict[str, float]


class _Call:
    __slots__ = ("client", "due_at", "refused_by", "service_s")

    def __init__(self, client: _Client, due_at: float, service_s: float) -> None:
        self.client = client
        self.due_at = due_at
        self.service_s = service_s
        self.refused_by: list[int] = []


class _Server:
    """One queue, one request at a time."""

    def __init__(self, number: int, speed: float, now: float) -> None:
        self.number = number
        self.speed = speed
        self.started_at = now
        self.is_alive = True
        self.queue: deque[_Call] = deque()
        self.current: _Call | None = None
        self.busy_s = 0.0
        self.counted_busy_s = 0.0
        self.answers = 0
        self.report = NO_REPORT
        self._rate = self._busy = 0.0
        self._samples = self._requests = self._ended = 0
        self._reported_busy_s = 0.0
        self._reported_at = now

    def answer(self, now: float) -> LoadReport:
        """Counts an answer and returns the report that goes with it."""
        self._ended += 1
        self._samples += 1
        self._requests += len(self.queue) + 1
        seconds = now - self._reported_at
        if seconds >= REPORT_INTERVAL_S:
            part = -math.expm1(-seconds / REPORT_MEMORY_S)
            self._rate += part * (self._ended / seconds - self._rate)
            self._busy += part * ((self.busy_s - self._reported_busy_s) / seconds - self._busy)
            self.report = LoadReport(self._rate, min(self._busy, 1.0), self._requests / self._samples)
            self._ended = self._samples = self._requests = 0
            self._reported_busy_s, self._reported_at = self.busy_s, now
        return self.report


class _Client:
    """What one client knows, and the servers that it uses of those that its last look-up found."""

    def __init__(self, found: Sequence[int], subset: int | None, rng: random.Random) -> None:
        self.view = View(rng)
        self.down: set[int] = set()
        self._subset = subset
        self._salt = rng.random()
        self.find(found, 0.0, rng.uniform(0, LOOKUP_S[1]))

    def find(self, found: Sequence[int], now: float, due_at: float) -> None:
        """Takes the servers that a look-up has found."""
        self._found = found
        self.down.intersection_update(found)
        self.looked_up_at, self.due_at = now, due_at
        self._use()

    def fail(self, number: int) -> None:
        """Marks a server down, and uses another one of a large fleet in its place."""
        if number in self._used:
            self.down.add(number)
            self._use()

    def _use(self) -> None:
        used = self._found
        if self._subset is not None and len(used) > self._subset:
            candidates = heapq.nsmallest(
                self._subset + len(self.down), used, key=lambda number: hash((self._salt, number))
            )
            used = [number for number in candidates if number not in self.down][: self._subset]
        self.servers = used
        self._used = frozenset(used)


class Model:
    """Runs a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        # Each way to balance gets the same requests, and the same servers die.
        self._rng, self._requests, self._deaths = map(random.Random, range(scenario.seed, scenario.seed + 3))
        self._choose, subset = BALANCINGS[scenario.balancing]
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._servers: dict[int, _Server] = {}
        self._found: tuple[int, ...] = ()
        self._times: list[float] = []
        self._offered = 0
        for speed in scenario.speeds:
            self._start(speed)
        self._clients = [_Client(self._found, subset, self._rng) for _ in range(scenario.clients)]
        mean_s = sum(scenario.service_s) / len(scenario.service_s)
        self._rate = scenario.load * sum(scenario.speeds) / mean_s

    def run(self) -> Outcome:
        """Runs to the end, and until every request has been answered or is too late."""
        end = self._scenario.seconds
        self._after(self._requests.expovariate(self._rate), self._arrive)
        while self._events:
            self._now, _, act, arguments = heapq.heappop(self._events)
            if self._now > end + self._scenario.timeout_s:
                break
            act(*arguments)
        return self._outcome()

    def _after(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), act, arguments))

    @property
    def _counts(self) -> bool:
        return self._scenario.warm_up_s <= self._now < self._scenario.seconds

    def _start(self, speed: float) -> None:
        server = _Server(len(self._servers), speed, self._now)
        self._servers[server.number] = server
        self._found = (*self._found, server.number)
        if self._scenario.lifetime_s < math.inf:
            self._after(
                self._deaths.expovariate(1 / self._scenario.lifetime_s),
                self._kill,
                server,
            )

    def _kill(self, server: _Server) -> None:
        server.is_alive = False
        self._found = tuple(number for number in self._found if number != server.number)
        calls = [*([server.current] if server.current else ()), *server.queue]
        server.queue.clear()
        server.current = None
        for call in calls:
            self._after(REFUSED_S, self._failed, call, server.number)
        self._after(self._scenario.replaced_after_s, self._start, server.speed)

    def _arrive(self) -> None:
        scenario, rng = self._scenario, self._requests
        if self._now < scenario.seconds:
            self._after(rng.expovariate(self._rate), self._arrive)
            self._offered += self._counts
            self._send(_Call(rng.choice(self._clients), self._now, rng.choice(scenario.service_s)))

    def _send(self, call: _Call) -> None:
        client, now = call.client, self._now
        if now >= client.due_at:
            client.find(self._found, now, now + self._rng.uniform(*LOOKUP_S))
        usable = client.servers
        if client.down or call.refused_by:
            usable = [each for each in usable if each not in client.down and each not in call.refused_by]
        if not usable:  # the SDK waits a random time, and then tries any of them
            call.refused_by.clear()
            client.down.clear()
            self._after(self._rng.uniform(0, 0.05), self._send, call)
            return
        number = self._choose(client.view, usable, now, self._rng)
        client.view.calls += 1
        client.view.known.setdefault(number, Known(reported_at=now)).count(1, now)
        if not self._servers[number].is_alive:
            self._after(REFUSED_S, self._failed, call, number)
            return
        self._after(self._scenario.overhead_s / 2, self._enqueue, call, number)

    def _enqueue(self, call: _Call, number: int) -> None:
        server = self._servers[number]
        if not server.is_alive:
            self._failed(call, number)
            return
        server.queue.append(call)
        if server.current is None:
            self._begin(server)

    def _begin(self, server: _Server) -> None:
        while server.queue:
            call = server.queue.popleft()
            if self._now < call.due_at + self._scenario.timeout_s:
                server.current = call
                seconds = call.service_s / server.speed
                self._after(seconds, self._end, server, call, seconds)
                return
            call.client.view.known[server.number].count(-1, self._now)

    def _end(self, server: _Server, call: _Call, seconds: float) -> None:
        if not server.is_alive:
            return
        server.busy_s += seconds
        if self._counts:
            server.counted_busy_s += seconds
            server.answers += 1
        self._after(
            self._scenario.overhead_s / 2,
            self._answered,
            call,
            server.number,
            server.answer(self._now),
        )
        server.current = None
        self._begin(server)

    def _answered(self, call: _Call, number: int, report: LoadReport) -> None:
        call.client.view.known[number].count(-1, self._now)
        call.client.view.note(number, report, self._now)
        if self._scenario.warm_up_s <= call.due_at < self._scenario.seconds:
            self._times.append(self._now - call.due_at)

    def _failed(self, call: _Call, number: int) -> None:
        client = call.client
        client.view.known[number].count(-1, self._now)
        client.due_at = min(client.due_at, client.looked_up_at + AFTER_FAILURE_S)
        client.fail(number)
        if self._now < call.due_at + self._scenario.timeout_s:
            call.refused_by.append(number)
            self._send(call)

    def _outcome(self) -> Outcome:
        times = np.asarray(self._times)
        in_time = times <= self._scenario.timeout_s
        window = self._scenario.seconds - self._scenario.warm_up_s
        settled = [each for each in self._servers.values() if each.is_alive and each.started_at == 0.0]
        busy = np.sort([each.counted_busy_s / window for each in settled])[::-1]
        busiest = busy[: max(len(busy) // 10, 1)]
        answers: dict[float, int] = {}
        for server in self._servers.values():
            answers[server.speed] = answers.get(server.speed, 0) + server.answers
        total = max(sum(answers.values()), 1)
        return Outcome(
            offered=self._offered,
            goodput=float(in_time.sum() / max(self._offered, 1)),
            p50_s=float(np.percentile(times[in_time], 50)),
            p99_s=float(np.percentile(times[in_time], 99)),
            imbalance=float(busiest.mean() / busy.mean()),
            shares={f"{speed:.3g}": count / total for speed, count in sorted(answers.items())},
        )
