"""One server of a client as the load balancer sees it, and the choice among several."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from bngrad._ahead.upload import Place
from bngrad._deadline import Cancellation, Deadline
from bngrad._requests.request import PreparedRequest
from bngrad._results import ServerInfo
from bngrad.typing import Array
from bngrad_wire.load_report import LoadReport

Result = TypeVar("Result")

FRESH_S = 3.0
"""After this the speed that a server reported is forgotten; the next calls find out whether it still holds."""
LONGEST_FRESH_S = 15.0
FRESH_CALLS = 4
"""But a client that has made fewer calls since then, for each of its servers, remembers for up to `LONGEST_FRESH_S`: it
would forget the speeds of some before it has learnt those of others."""
_SILENT_S = 1.0
"""After this a server that has calls but ended none is asked whether it can compute any."""
CLOSE_TO_BEST = 1.2
"""Servers up to this factor from the best one are as good; one of them is taken at random."""
MAX_COMPARED = 16
"""Of more servers, a random choice is compared: it costs a call the same whatever their number."""


class Selector(Protocol):
    """Makes the calls to one server; see `bngrad._transports.selector.TransportSelector`, whose methods these are."""

    @property
    def has_answered(self) -> bool:
        """Whether the server has ever answered a question for its endpoints."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether the tensors of calls travel over a network, by our own HTTP/2."""
        ...

    @property
    def load(self) -> LoadReport | None:
        """What the server last reported of its load; the same object until there is a newer report."""
        ...

    def run(self, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation) -> Result:
        """Makes a call, without retries."""
        ...

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        """Asks the server for its `ServerInfo`."""
        ...

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], deadline: Deadline, cancellation: Cancellation
    ) -> Array:
        """Makes an array in memory that is shared with the server."""
        ...

    def send_ahead(
        self, tensor: Array | None, forget: Sequence[bytes], deadline: Deadline, cancellation: Cancellation
    ) -> Place | None:
        """Sends a tensor ahead of the calls that need it, and has the server forget others."""
        ...

    def copy_to_gpu(self, copy: Array, deadline: Deadline, cancellation: Cancellation) -> bytes:
        """Has a GPU copy a tensor that lies in shared memory; returns the ticket of the copy, if there is one."""
        ...

    def close(self) -> None:
        """Closes the connections."""
        ...


class Use:
    """A call in flight to a server. Once this object has gone the call is no longer in flight, whatever ended it."""

    def __init__(self, server: Upstream) -> None:
        self.server = server


class Upstream:
    """One server of a client, as the load balancer sees it.

    Attributes:
        selector: Makes the calls to it.
        is_up: Whether it gets calls; a server that is down gets them only if all are.
        has_failed: Whether it is known not to be available, or to have no worker that is ready.
        strikes: How often it was marked down since it last answered a call.
        is_probed: Whether a thread probes it until it is up.
        retired: Set once it is no longer a server of the client.
        load: The last report that was taken into account.
        capacity: The requests per second that it can compute, as it says; None if it does not say.
    """

    def __init__(self, selector: Selector, *, is_up: bool = True) -> None:
        self.selector = selector
        self.is_up = is_up
        self.has_failed = False
        self.strikes = 0
        self.is_probed = False
        self.retired = threading.Event()
        self.load: LoadReport | None = None
        self.capacity: float | None = None
        self._reported_at = self._counted_at = self._heard_at = time.monotonic()
        self._calls_at_report = 0
        self._calls_s = 0.0
        self._uses: set[weakref.ref[Use]] = set()

    @property
    def in_flight(self) -> int:
        """How many calls it has."""
        return len(self._uses)

    def count(self, *, begun: Use | None = None, ended: Use | None = None) -> None:
        """Counts the calls in flight, with one that begins, or without one that ends."""
        now = time.monotonic()
        if ended is not None or not self._uses:
            self._heard_at = now
        self._calls_s += len(self._uses) * (now - self._counted_at)
        self._counted_at = now
        if begun is not None:
            self._uses.add(weakref.ref(begun, self._uses.discard))
        if ended is not None:
            self._uses.discard(weakref.ref(ended))

    @property
    def is_silent(self) -> bool:
        """Whether it has had calls for a while, and ended none."""
        return self._counted_at - self._heard_at > _SILENT_S

    def hear(self) -> None:
        """Records a sign of life."""
        self._heard_at = time.monotonic()

    def note(self, load: LoadReport, calls: int) -> float | None:
        """Takes a new report into account; returns what part of the requests there were this client's, if known.

        Args:
            load: The report.
            calls: How many calls the client has made so far.
        """
        self.count()
        own = self._calls_s / max(self._counted_at - self._reported_at, 1e-9)
        self._reported_at, self._calls_s = self._counted_at, 0.0
        self.load, self.capacity, self._calls_at_report = load, load.capacity, calls
        return min(own / load.requests, 1.0) if load.requests > 0 else None

    def cost(self, now: float, usual: float, others: float, calls: int, servers: int) -> float:
        """Returns how long a call would take there in relation to other servers; see `choose`."""
        is_known = is_fresh(now - self._reported_at, calls - self._calls_at_report, servers)
        capacity = self.capacity if is_known else None
        ahead = len(self._uses) + 1.0
        if others:
            ahead += others * (random.expovariate(1.0) - 1.0)
        return ahead / (capacity or usual)


def is_fresh(age_s: float, calls: int, servers: int) -> bool:
    """Returns whether a report still counts: by its age, and by the calls that the client has made since, to all."""
    return age_s < FRESH_S or (age_s < LONGEST_FRESH_S and calls < FRESH_CALLS * servers)


def choose(servers: Sequence[Upstream], usual: float, others: float, calls: int) -> Upstream:
    """Returns the server where a call ends first, as far as is known.

    It is a random one among equals, or all clients would start with the same. If most requests are those of other
    clients, of which this one knows nothing, it is a random one in proportion to the capacities: what servers report of
    their queues is late, and all clients would heed it at the same time.

    Args:
        servers: At least two.
        usual: The capacity of a server that does not report it.
        others: What part of the requests in the servers are those of other clients.
        calls: How many calls the client has made so far.
    """
    count = len(servers)
    if count > MAX_COMPARED:
        servers = random.sample(servers, MAX_COMPARED)
    now = time.monotonic()
    costs = [server.cost(now, usual, others, calls, count) for server in servers]
    limit = min(costs) * CLOSE_TO_BEST
    good = [server for server, cost in zip(servers, costs, strict=True) if cost <= limit]
    return good[0] if len(good) == 1 else random.choice(good)  # noqa: S311 - not a secret
