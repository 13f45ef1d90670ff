"""Finds a server's endpoints beside grpcio's: asks for them at the first call, and again when one is lost."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import grpc

from bngrad._credentials import Credentials
from bngrad._deadline import Cancellation, Deadline, acquire
from bngrad._errors import (
    BngradError,
    ClientClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    from_status,
)
from bngrad._shared_memory.pool import Pool
from bngrad._transports.connector import Address
from bngrad._transports.http2 import Http2Transport
from bngrad._transports.server_state import ServerState
from bngrad._validation import host_and_port_of
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import lease_protocol
from bngrad_wire.addresses import MAX_PORT, format_host_port

logger = logging.getLogger("bngrad")

_BLOCKED_S = 10.0
"""How long an unreachable address is not tried; doubled each time that it is still unreachable afterwards."""
_LONGEST_BLOCKED_S = 300.0

Ask: TypeAlias = Callable[[Deadline, Cancellation], pb.Endpoints]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """A server's endpoints beside grpcio's.

    Attributes:
        unix: The Unix socket for calls, if the server is on this host.
        pool: The memory shared with that server.
        tcp: The TCP port for calls from other hosts.
        is_local: Whether the server is on this host, even if its Unix socket cannot be reached now.
        copied_ahead_nbytes: The size from which the server has a GPU copy tensors in shared memory ahead of their
            requests; 0 if it has no GPU.
        stale_at: When to ask the server for its endpoints again, on the monotonic clock.
    """

    unix: Http2Transport | None = None
    pool: Pool | None = None
    tcp: Http2Transport | None = None
    is_local: bool = False
    copied_ahead_nbytes: int = 0
    stale_at: float = math.inf

    @property
    def is_stale(self) -> bool:
        """Whether to ask the server for its endpoints again."""
        return time.monotonic() >= self.stale_at

    def without(self, transport: Http2Transport) -> Endpoints:
        """Returns the other endpoints, which are stale at once."""
        if transport is self.tcp:
            return replace(self, tcp=None, stale_at=0.0)
        return replace(self, unix=None, pool=None, stale_at=0.0)

    def close(self, but: Endpoints | None = None) -> None:
        """Closes all but those that others hold too."""
        kept = () if but is None else (but.unix, but.pool, but.tcp)
        for each in (self.unix, self.pool, self.tcp):
            if each is not None and each not in kept:
                each.close()


class EndpointDiscovery:
    """Knows the endpoints of one server."""

    def __init__(self, target: str, credentials: Credentials, server: ServerState) -> None:
        """Asks nothing yet; ``server`` is its state."""
        self._server = server
        self._has_warned = False
        self._credentials = credentials
        self._target = target
        self._mutex = threading.Lock()
        self._discovering = threading.RLock()
        self._current: Endpoints | None = None
        self._blocked: dict[Address, tuple[float, float]] = {}
        self._unreachable: set[Address] = set()  # of those ever blocked; connections to others worked before
        self._closed = False

    @property
    def is_remote(self) -> bool:
        """Whether the server is on another host, and is reached by the SDK's own HTTP/2, as far as is known."""
        current = self._current
        return current is not None and current.tcp is not None and not current.is_local

    def endpoints(self, ask: Ask, deadline: Deadline, cancellation: Cancellation) -> Endpoints:
        """Returns the endpoints; asks the server for them if they are unknown or stale.

        Raises:
            BngradError: The server does not answer, or the client was closed.
        """
        current = self._current
        if current is not None and not current.is_stale:
            return current
        try:
            if not acquire(self._discovering, deadline, cancellation):
                if cancellation.cancelled:
                    raise UnavailableError(f"the call to {self._target} was cancelled")
                reason = "another call still waits for the server's endpoints"
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                raise from_status(code, reason, b"", self._target, deadline.timeout)
            current = self._current
            while current is None or current.is_stale:
                current = self._discover(current or Endpoints(), lambda: ask(deadline, cancellation))
            return current
        finally:
            try:  # noqa: SIM105 - Ctrl-C could come before suppress() has begun
                self._discovering.release()
            except RuntimeError:  # it is not held
                pass

    def _discover(self, before: Endpoints, ask: Callable[[], pb.Endpoints]) -> Endpoints | None:
        """Asks the server for its endpoints; returns the current ones instead if one was lost meanwhile."""
        blocked = set(self._blocked)
        found = self._connect(*_advertised(ask), before)
        if set(self._blocked) - blocked:
            # The server may have ended since it answered, and another one may have started.
            found.close(but=before)
            found = self._connect(*_advertised(ask), before)
        with self._mutex:
            is_closed, current = self._closed, self._current
            is_unchanged = not is_closed and (current is None or current is before)
            if is_unchanged:
                self._current = found
        if is_closed:
            found.close()
            raise ClientClosedError("the client was closed during the call")
        if not is_unchanged:
            found.close(but=before)
            return current
        before.close(but=found)
        return found

    def _connect(self, advertised: pb.Endpoints, stale_at: float, before: Endpoints) -> Endpoints:
        """Returns the advertised endpoints that are not blocked; keeps those of before that are still the same."""
        unix, pool, tcp = before.unix, before.pool, before.tcp
        directory = advertised.local_directory
        path = f"{directory}/{lease_protocol.CALLS}"
        if unix is None or unix.address != path:
            unix = pool = None
            if directory and not self._is_blocked(path):
                unix = Http2Transport(path, self._target, self._credentials, self._server)
                pool = Pool(f"{directory}/{lease_protocol.REGIONS}", self._credentials)
                if not unix.is_reachable():
                    self._block(unix)
                    unix = pool = None
            if directory and unix is None:
                stale_at = min(stale_at, self._blocked[path][0])
        host, port = host_and_port_of(self._target) or ("", 0)
        if not advertised.is_at_given_port:
            host, port = advertised.stream_host or host, advertised.stream_port
        address = host, port
        if tcp is None or tcp.address != address:
            tcp = None
            if address[0] and 0 < address[1] <= MAX_PORT:
                credentials = self._credentials.for_host(advertised.stream_host)
                if self._is_blocked(address):
                    stale_at = min(stale_at, self._blocked[address][0])
                    if address in self._unreachable:  # and the server has answered, so it is alive
                        self._warn(address)
                elif credentials is not None:
                    name = format_host_port(*address) if advertised.stream_host else self._target
                    tcp = Http2Transport(address, name, credentials, self._server)
        is_local = bool(directory) and os.path.exists(path)
        return Endpoints(unix, pool, tcp, is_local, advertised.copied_ahead_bytes, stale_at)

    def lose(self, endpoints: Endpoints, transport: Http2Transport) -> None:
        """Blocks the address of an endpoint that was lost, and has the server asked for its endpoints again."""
        self._block(transport)
        rest = endpoints.without(transport)
        with self._mutex:
            if self._current is not endpoints:
                return
            self._current = rest
        endpoints.close(but=rest)

    def close(self) -> None:
        """Closes every endpoint."""
        with self._mutex:
            self._closed = True
            current, self._current = self._current, None
        if current is not None:
            current.close()

    def _block(self, transport: Http2Transport) -> None:
        now = time.monotonic()
        until, seconds = self._blocked.get(transport.address, (-math.inf, 0.0))
        if now >= until:
            in_a_row = now < until + seconds
            seconds = min(2 * seconds, _LONGEST_BLOCKED_S) if in_a_row else _BLOCKED_S
            self._blocked[transport.address] = (now + seconds, seconds)
            if in_a_row or not transport.was_connected:
                self._unreachable.add(transport.address)

    def _warn(self, address: tuple[str, int]) -> None:
        """Logs once what calls do without the server's TCP port."""
        if self._has_warned:
            return
        self._has_warned = True
        if address == host_and_port_of(self._target):
            problem = (
                "answers grpcio, but not the SDK's own connections, or has ended them more than once: it may have been "
                "started again, or be behind a proxy"
            )
        else:
            place = format_host_port(*address)
            problem = f"does not answer at {place}, its own address for the SDK, which may be behind a firewall"
        logger.warning(
            "%s %s; calls go to %s by grpcio, more slowly, and the SDK's own connections are tried again from time to "
            "time, beside the calls",
            self._target, problem, self._target,
        )  # fmt: skip

    def _is_blocked(self, address: Address) -> bool:
        return address in self._blocked and self._blocked[address][0] > time.monotonic()


def _advertised(ask: Callable[[], pb.Endpoints]) -> tuple[pb.Endpoints, float]:
    """Returns the endpoints that a server tells, and when to ask it again."""
    try:
        return ask(), math.inf
    except (UnavailableError, DeadlineExceededError, UnauthenticatedError, InvalidArgumentError):
        raise
    except UnimplementedError:  # an older server, or another service
        return pb.Endpoints(), math.inf
    except BngradError:  # such as that of a proxy in trouble
        return pb.Endpoints(), time.monotonic() + _BLOCKED_S
