"""Admission control: limits the work in the server to what it can do in time, shared evenly among clients."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bngrad_server.errors import OverloadedError, RequestTooLargeError
from bngrad_server.scheduling.job import WORK_OF_ANY_REQUEST

_ALWAYS_REQUESTS = 16
"""Up to this many requests, and no more than may be admitted, are admitted whatever the estimates say."""
_BUSY_REQUESTS = 8
"""With this many requests, apart from those that wait for their clients, the server works at its full rate."""
_WINDOW_S = 0.5
_WINDOWS = 8
_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 0.02, 5.0
_CLIENT_RETRY_S = 0.05
_REFUSED_S = 5.0
"""How long a client that was refused for its limits is expected to ask for as much; later requests may be small."""


class Admission:
    """Counts the requests that are admitted, and measures how fast they leave.

    A new request is expected to wait for the admitted work divided by the highest rate at which work was lately done
    while the server was busy. The server is full when that is longer than the request may wait, or when too many
    requests are admitted. A full server still admits the requests of a client that has less than an even share, up to
    twice the number of requests, so that no client is kept out by the requests of another.

    Attributes:
        limits_clients: Whether a client may have so many requests or bytes alone.
        admitted: How many requests are admitted now.
        on_leave: What is called when a request has left, if clients have limits.
    """

    def __init__(
        self, max_requests: int, max_wait_s: float, max_client_requests: int = 0, max_client_bytes: int = 0
    ) -> None:
        """See `bngrad_server.config.ServerConfig`, whose settings these are."""
        self.limits_clients = max_client_requests > 0 or max_client_bytes > 0
        self._max_client_requests = max_client_requests or math.inf
        self._max_client_bytes = max_client_bytes or math.inf
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._mutex = threading.Lock()
        self.admitted = 0
        self._transfers = 0
        self._work = 0
        self._requests_of: Counter[str] = Counter()
        self._work_of: Counter[str] = Counter()
        self._received_of: Counter[str] = Counter()
        self._refused_of: dict[str, tuple[int, float]] = {}  # the bytes of a client's last such request, and until when
        self.on_leave: list[Callable[[], object]] = []
        self._rates: deque[float] = deque(maxlen=_WINDOWS)
        self._rate = 0.0  # unknown
        self._window_start = time.monotonic()
        self._window_work = 0
        self._was_busy = False  # all through the window

    def room(self, client: str) -> float:
        """How many bytes of tensors a client may have besides those of its requests; infinite without a limit."""
        if not self.limits_clients:
            return math.inf
        with self._mutex:
            return self._max_client_bytes - self._held(client)

    def is_worthwhile(self, client: str) -> bool:
        """Whether a client may have another request like the one that was last refused for what it has already."""
        nbytes, until = self._refused_of.get(client, (0, 0.0))
        if time.monotonic() >= until:
            return True
        with self._mutex:
            requests, held = self._requests_of[client] + 1, self._held(client)
            return requests <= self._max_client_requests and held + nbytes <= self._max_client_bytes

    def enter(self, client: str, nbytes: int, deadline: float | None) -> None:
        """Admits a request, until `leave`.

        Args:
            client: The client that sent it.
            nbytes: The size of its tensors.
            deadline: When it must be answered, on the monotonic clock; None means any time.

        Raises:
            OverloadedError: The server is full, or the client has as much in it as it may.
            RequestTooLargeError: The client may never have as much in it.
        """
        work = nbytes + WORK_OF_ANY_REQUEST
        with self._mutex:
            self._check(client, work, deadline)
            self.admitted += 1
            self._work += work
            self._requests_of[client] += 1
            self._work_of[client] += work
            self._refused_of.pop(client, None)

    def pass_through(self, client: str, nbytes: int, deadline: float | None) -> None:
        """Admits a request that is computed at once, and leaves before any other can come.

        Raises:
            OverloadedError: As `enter`.
            RequestTooLargeError: As `enter`.
        """
        with self._mutex:
            self._check(client, nbytes + WORK_OF_ANY_REQUEST, deadline)

    def check(self, client: str, deadline: float | None) -> None:
        """Rejects a request that `enter` would reject whatever its size; this is cheaper than to find out the size.

        Raises:
            OverloadedError: The server is full.
        """
        with self._mutex:
            self._check(client, WORK_OF_ANY_REQUEST, deadline)

    def leave(self, client: str, nbytes: int, *, computed: bool) -> None:
        """Ends the admission of a request; the work of one that was not computed is not counted in the rate."""
        work = nbytes + WORK_OF_ANY_REQUEST
        with self._mutex:
            self.admitted -= 1
            self._was_busy &= self._is_busy
            self._work -= work
            self._requests_of[client] -= 1
            self._work_of[client] -= work
            if not self._requests_of[client]:
                del self._requests_of[client], self._work_of[client]
                self._refused_of.pop(client, None)
            self._measure(work if computed else 0)
        if self.limits_clients:
            for callback in self.on_leave:
                callback()

    @contextmanager
    def receiving(self, client: str, nbytes: int, deadline: float | None) -> Iterator[None]:
        """Counts a message among its client's bytes while it is received; raises what `enter` does."""
        with self._mutex:
            self._check(client, nbytes + WORK_OF_ANY_REQUEST, deadline)
            self._received_of[client] += nbytes
        try:
            yield
        finally:
            with self._mutex:
                self._received_of[client] -= nbytes
                if not self._received_of[client]:
                    del self._received_of[client]

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Counts an admitted request as one that waits for its client rather than for the server."""
        with self._mutex:
            self._transfers += 1
            self._was_busy &= self._is_busy
        try:
            yield
        finally:
            with self._mutex:
                self._transfers -= 1

    @property
    def _is_busy(self) -> bool:
        return self.admitted - self._transfers >= _BUSY_REQUESTS

    def _check(self, client: str, work: int, deadline: float | None) -> None:
        if self.limits_clients:
            self._check_client(client, work)
        if self.admitted < min(_ALWAYS_REQUESTS, self._max_requests):
            return
        max_wait_s = self._max_wait_s
        if deadline is not None:
            # Half, so that an admitted request meets its deadline even if the estimate was too low.
            max_wait_s = max(min(max_wait_s, (deadline - time.monotonic()) / 2), _SHORTEST_RETRY_S)
        total = self._fullness(self.admitted + 1, self._work + work, max_wait_s)
        if total <= 1:
            return
        own = self._fullness(self._requests_of[client] + 1, self._work_of[client] + work, max_wait_s)
        clients = len(self._requests_of) + (client not in self._requests_of)
        if own * clients <= 1 and self.admitted < 2 * self._max_requests:
            return
        excess_s = (total - 1) / total * self._wait_s(self._work + work)
        # Rounded, so that equal errors recur: their serialised statuses are cached.
        retry_delay_s = round(min(max(excess_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S), 2)
        is_many = self.admitted >= self._max_requests
        load = f"{self._max_requests} requests" if is_many else f"about {self._wait_s(self._work):.1f} s of work"
        raise OverloadedError(f"the server is full: {load}", retry_delay_s)

    def _check_client(self, client: str, work: int) -> None:
        """Rejects a client that has reached its limits."""
        requests, nbytes = self._requests_of[client], work - WORK_OF_ANY_REQUEST
        limit = f"the {self._max_client_bytes} bytes that it may have (max_client_bytes)"
        if requests >= self._max_client_requests:
            problem = f" has {requests} requests in progress already, the most that it may"
        elif nbytes > self._max_client_bytes:
            raise RequestTooLargeError(f"this client's request of {nbytes} bytes is more than {limit}")
        elif self._held(client) + nbytes > self._max_client_bytes:
            problem = f"'s requests would have more than {limit} in progress"
        else:
            return
        if requests:
            self._refused_of[client] = nbytes, time.monotonic() + _REFUSED_S
        raise OverloadedError(f"this client{problem}", _CLIENT_RETRY_S)

    def _held(self, client: str) -> int:
        requests = self._requests_of[client] * WORK_OF_ANY_REQUEST
        return self._work_of[client] - requests + self._received_of[client]

    def _fullness(self, requests: int, work: int, max_wait_s: float) -> float:
        return max(requests / self._max_requests, self._wait_s(work) / max_wait_s)

    def _wait_s(self, work: int) -> float:
        return work / self._rate if self._rate else 0.0

    def _measure(self, work: int) -> None:
        """Counts work that was done, and computes the rate at the end of a window."""
        self._window_work += work
        now = time.monotonic()
        if now - self._window_start < _WINDOW_S:
            return
        rate = self._window_work / (now - self._window_start)
        if self._was_busy:
            self._rates.append(rate)
            self._rate = max(self._rates)
        self._window_start, self._window_work = now, 0
        self._was_busy = self._is_busy
