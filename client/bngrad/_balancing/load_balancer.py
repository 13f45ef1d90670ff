"""Chooses the server of each call, among those of a client."""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np

from bngrad._balancing.resolver import Resolver
from bngrad._balancing.retry import delay_s
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import BngradError, DeadlineExceededError, NotSharedError, UnavailableError, from_status
from bngrad._requests.request import PreparedRequest
from bngrad._results import ServerInfo
from bngrad.typing import Array

Result = TypeVar("Result")

_PROBE_TIMEOUT_S = 5.0


class Selector(Protocol):
    """Makes the calls to one server; see `bngrad._transports.selector.TransportSelector`, whose methods these are."""

    @property
    def has_answered(self) -> bool:
        """Whether the server has ever answered a question for its endpoints."""
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

    def close(self) -> None:
        """Closes the connections."""
        ...


class Upstream:
    """One server of a client, as the load balancer sees it.

    Attributes:
        selector: Makes the calls to it.
        in_flight: How many calls it has.
        is_up: Whether it gets calls; a server that is down gets them only if all are.
        strikes: How often it was marked down since it last answered a call.
        is_probed: Whether a thread probes it until it is up.
        retired: Set once it is no longer a server of the client.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.in_flight = 0
        self.is_up = True
        self.strikes = 0
        self.is_probed = False
        self.retired = threading.Event()


class LoadBalancer:
    """Spreads calls over servers: the next call goes to the server with the fewest in flight.

    A server that is not available is marked down. A thread then probes it, with growing pauses, until it answers and
    has a worker that is ready; no call has to try it.
    """

    def __init__(self, targets: Sequence[str], connect: Callable[[str, str | None], Selector]) -> None:
        """Connects to nothing yet.

        Args:
            targets: Addresses, and names that may stand for several addresses.
            connect: Makes the selector for an address and the host name that it was resolved from, if any.
        """
        self._targets = targets
        self._connect = connect
        self._mutex = threading.Lock()
        self._servers: dict[str, Upstream] = {}
        self._closed = False
        self._was_reached = False
        self._resolver = Resolver(targets)
        if not self._resolver.has_names:
            self._resolver.resolve(self._use)
            self._resolver.first.result()

    @property
    def was_reached(self) -> bool:
        """Whether any server has ever answered."""
        return self._was_reached or any(server.selector.has_answered for server in list(self._servers.values()))

    def prepare(self, deadline: Deadline, cancellation: Cancellation) -> None:
        """Waits until the names are resolved for the first time."""
        if self._servers:
            return
        self._resolver.resolve(self._use)
        first, resolved = self._resolver.first, threading.Event()
        first.add_done_callback(lambda _: resolved.set())
        with cancellation.calls(resolved.set):
            resolved.wait(deadline.remaining_s())
        if cancellation.cancelled or self._closed:
            raise UnavailableError("the call was cancelled")
        if first.done():
            first.result()
        else:
            reason, code = "its name is still being looked up", grpc.StatusCode.DEADLINE_EXCEEDED
            raise from_status(code, reason, b"", ", ".join(self._targets), deadline.timeout)

    def acquire(self, excluded: Container[object] = (), *, in_order: bool = False) -> Upstream | None:
        """Returns the server for the next call, until `release`; None if all that could be used are excluded.

        Args:
            excluded: Servers that must not be used yet.
            in_order: Whether to use the first server that is up, however many calls it has.
        """
        with self._mutex:
            servers = self._servers.values()
            usable = [each for each in servers if each.is_up] or servers
            usable = [each for each in usable if each not in excluded]
            if not usable:
                return None
            # A random one among equals, or all clients would start with the same.
            chosen = usable[0] if in_order or len(usable) == 1 else min(usable, key=_load)
            chosen.in_flight += 1
            return chosen

    def release(self, server: Upstream) -> None:
        """Ends the use that `acquire` began."""
        with self._mutex:
            server.in_flight -= 1
            is_over = server.in_flight == 0 and server.retired.is_set()
        if is_over:
            server.selector.close()

    def answered(self, server: Upstream) -> None:
        """Records that a server has answered a call."""
        server.is_up = True
        server.strikes = 0
        self._was_reached = True

    def failed(self, server: Upstream, error: BngradError) -> None:
        """Records that a call failed; marks the server down if it is not available."""
        if isinstance(error, NotSharedError):  # the client may know this without asking the server
            return
        if not isinstance(error, UnavailableError | DeadlineExceededError):
            self._was_reached = True
            return
        self._resolver.resolve(self._use)
        with self._mutex:
            if not server.is_up or len(self._servers) == 1 or self._closed:
                return
            server.is_up = False
            server.strikes += 1
            needs_probe = not server.is_probed
            server.is_probed = True
        if needs_probe:
            thread = threading.Thread(
                target=_probe_until_up, args=(weakref.ref(self), server), name="bngrad-probe", daemon=True
            )
            thread.start()

    def close(self) -> None:
        """Closes the connections to every server."""
        with self._mutex:
            self._closed = True
            servers = list(self._servers.values())
        for server in servers:
            server.retired.set()
            server.selector.close()

    def _use(self, targets: list[str]) -> None:
        """Sends calls to these servers from now on; the calls that others have in flight finish."""
        with self._mutex:
            if self._closed:
                return
            before = self._servers
            self._servers = {
                target: before[target]
                if target in before
                else Upstream(self._connect(target, self._resolver.hostname_of(target)))
                for target in targets
            }
            gone = [server for target, server in before.items() if target not in self._servers]
            for server in gone:
                server.retired.set()
            idle = [server for server in gone if server.in_flight == 0]
        for server in idle:
            server.selector.close()

    def probe(self, server: Upstream) -> bool:
        """Asks a server that is marked down for its state, and returns whether it is up."""
        with self._mutex:
            if server.is_up:  # a call was answered meanwhile
                server.is_probed = False
                return True
        try:
            deadline = Deadline.after(_PROBE_TIMEOUT_S)
            devices = server.selector.server_info(deadline, Cancellation(only_by_close=True)).devices
        except (UnavailableError, DeadlineExceededError):
            return False
        except Exception:  # The server answered; or the next call will raise the same, such as for a missing token.
            devices = ()
        if devices and not any(device.state == "ready" for device in devices):
            return False
        with self._mutex:
            server.is_up = True
            server.is_probed = False
        return True


def _probe_until_up(load_balancer: weakref.ref[LoadBalancer], server: Upstream) -> None:
    """Probes a server that is marked down until it is up or the client has gone, even if it was never closed."""
    for failures in itertools.count(server.strikes):
        if server.retired.wait(delay_s(failures)):
            return
        alive = load_balancer()
        if alive is None:
            server.selector.close()
            return
        if alive.probe(server):
            return
        del alive


def _load(server: Upstream) -> tuple[int, float]:
    return server.in_flight, random.random()  # noqa: S311 - not a secret
