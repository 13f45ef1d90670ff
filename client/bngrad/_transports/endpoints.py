"""The ways to a server beside grpcio: asked for at the first call, and again when one is lost."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc

from bngrad._balancing.resolver import host_and_port
from bngrad._cancellation import Cancellation
from bngrad._credentials import Access
from bngrad._deadline import Deadline
from bngrad._errors import (
    BngradError,
    ClientClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
    from_status,
)
from bngrad._shared_memory.pool import Pool
from bngrad._transports.http2 import DirectEndpoint
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb

_BLOCKED_S = 10.0
"""How long an endpoint that cannot be reached is left alone; twice as long if it then still cannot, and so on."""
_LONGEST_BLOCKED_S = 300.0


Ask: TypeAlias = Callable[[Deadline, Cancellation], pb.Endpoints]


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to a server beside grpcio.

    Attributes:
        local: The endpoint on this host.
        shared: The memory shared with it.
        remote: The endpoint on the server's TCP port.
        is_here: Whether the server is on this host, also if its endpoint there cannot be reached for now.
        stale_at: When to ask the server for its endpoints again, on the monotonic clock.
    """

    local: DirectEndpoint | None = None
    shared: Pool | None = None
    remote: DirectEndpoint | None = None
    is_here: bool = False
    stale_at: float = math.inf

    @property
    def is_stale(self) -> bool:
        return time.monotonic() >= self.stale_at

    def without(self, endpoint: DirectEndpoint) -> Ways:
        """The other ways, and the question for more at the next call."""
        if endpoint is self.remote:
            return replace(self, remote=None, stale_at=0.0)
        return replace(self, local=None, shared=None, stale_at=0.0)

    def close(self, but: Ways | None = None) -> None:
        """Closes all that are not among others."""
        kept = () if but is None else (but.local, but.shared, but.remote)
        for each in (self.local, self.shared, self.remote):
            if each is not None and each not in kept:
                each.close()


class Discovery:
    """Knows the ways to one server."""

    def __init__(self, target: str, access: Access) -> None:
        """Asks nothing yet.

        Args:
            target: The server's address.
            access: How the server is reached.
        """
        self._access = access
        self._target = target
        self._mutex = threading.Lock()
        self._discovering = threading.Lock()
        self._ways: Ways | None = None
        self._blocked: dict[Any, tuple[float, float]] = {}
        self._closed = False

    def ways(self, ask: Ask, deadline: Deadline, cancellation: Cancellation) -> Ways:
        """The ways that there are now; asks the server where that is not known.

        Args:
            ask: Asks the server for its endpoints.
            deadline: When to give up.
            cancellation: Where to hear that the caller has.

        Raises:
            BngradError: The server does not answer, or the client was closed.
        """
        ways = self._ways
        if ways is not None and not ways.is_stale:
            return ways
        rest_s = deadline.rest_s()
        if not self._discovering.acquire(timeout=-1 if rest_s is None else rest_s):
            reason = "another call still waits for the server's endpoints"
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise from_status(code, reason, b"", self._target, deadline.timeout)
        try:
            ways = self._ways
            while ways is None or ways.is_stale:
                ways = self._discover(ways or Ways(), lambda: ask(deadline, cancellation))
            return ways
        finally:
            self._discovering.release()

    def _discover(self, before: Ways, ask: Callable[[], pb.Endpoints]) -> Ways | None:
        """Asks the server for its endpoints; gives what is there instead if a way was lost meanwhile."""
        blocked = set(self._blocked)
        ways = self._ways_to(_endpoints(ask), before)
        if set(self._blocked) - blocked:
            # The server may have gone since it answered, and another one may have begun.
            ways = self._ways_to(_endpoints(ask), before)
        with self._mutex:
            is_closed, present = self._closed, self._ways
            is_current = not is_closed and (present is None or present is before)
            if is_current:
                self._ways = ways
        if is_closed:
            ways.close()
            raise ClientClosedError("was closed during the call")
        if not is_current:
            ways.close(but=before)
            return present
        before.close(but=ways)
        return ways

    def _ways_to(self, endpoints: pb.Endpoints, before: Ways) -> Ways:
        """The ways to the endpoints, except those that are left alone for now; those that there were before stay."""
        local, shared, remote = before.local, before.shared, before.remote
        stale_at = math.inf
        directory = endpoints.local_directory
        path = f"{directory}/calls"
        if local is None or local.address != path:
            local = shared = None
            if directory and not self._is_blocked(path):
                local, shared = (
                    DirectEndpoint(path, self._target, self._access),
                    Pool(f"{directory}/regions", self._access),
                )
                if not local.is_there():
                    self._block(local)
                    local = shared = None
            if directory and local is None:
                stale_at = self._blocked[path][0]
        place = host_and_port(self._target)
        address = ("" if place is None else place[0], endpoints.stream_port)
        if remote is None or remote.address != address:
            remote = None
            if place is not None and 0 < endpoints.stream_port < 2**16:
                if self._is_blocked(address):
                    stale_at = min(stale_at, self._blocked[address][0])
                else:
                    remote = DirectEndpoint(address, self._target, self._access)
        return Ways(local, shared, remote, bool(directory) and os.path.exists(path), stale_at)

    def lose(self, ways: Ways, endpoint: DirectEndpoint) -> None:
        """Leaves an endpoint alone for a while, and asks the server for its endpoints again."""
        self._block(endpoint)
        rest = ways.without(endpoint)
        with self._mutex:
            if self._ways is not ways:
                return
            self._ways = rest
        ways.close(but=rest)

    def close(self) -> None:
        """Closes every way."""
        with self._mutex:
            self._closed = True
            ways, self._ways = self._ways, None
        if ways is not None:
            ways.close()

    def _block(self, endpoint: DirectEndpoint) -> None:
        now = time.monotonic()
        until, seconds = self._blocked.get(endpoint.address, (-math.inf, 0.0))
        if now >= until:
            in_a_row = now < until + seconds
            seconds = min(2 * seconds, _LONGEST_BLOCKED_S) if in_a_row else _BLOCKED_S
            self._blocked[endpoint.address] = (now + seconds, seconds)

    def _is_blocked(self, address: Any) -> bool:
        return address in self._blocked and self._blocked[address][0] > time.monotonic()


def _endpoints(ask: Callable[[], pb.Endpoints]) -> pb.Endpoints:
    try:
        return ask()
    except (UnavailableError, DeadlineExceededError, UnauthenticatedError, InvalidArgumentError):
        raise
    except BngradError:
        return pb.Endpoints()  # an older server, or something else that answers calls
