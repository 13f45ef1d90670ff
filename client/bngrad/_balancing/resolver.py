"""Resolves targets into the addresses of servers, again and again while calls are made."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple

from bngrad._errors import UnavailableError
from bngrad._validation import host_and_port_of
from bngrad_wire.addresses import format_host_port

logger = logging.getLogger("bngrad")

_LONGEST_INTERVAL_S = 6.0
"""With the 5 s for which name servers in clusters keep an answer, a new server gets calls within 11 s."""
_JITTER = 1 / 3
"""By what part of the longest an interval may be shorter, so that clients do not ask at the same time."""
_AFTER_FAILURE_S = 1.0
"""How soon after the last look-up a call that failed has the next one begin."""


class Address(NamedTuple):
    """One server of a target.

    Attributes:
        target: What to connect to: the target itself, unless it is a name of several addresses.
        hostname: The host name that the address was resolved from; None if the target has the name.
        ip: The address that the target's name has now; empty if it is no name.
    """

    target: str
    hostname: str | None = None
    ip: str = ""


def hostname_and_port_of(target: str) -> tuple[str, int] | None:
    """Returns the host name and port of a target; None if it names no host, or an IP address."""
    host_and_port = host_and_port_of(target)
    if host_and_port is None:
        return None
    try:
        ipaddress.ip_address(host_and_port[0])
    except ValueError:
        return host_and_port
    return None


def lookup(target: str) -> list[Address]:
    """Returns the servers that a target stands for.

    Only addresses of the family that the system prefers count, since most hosts with both have one address of each.

    Raises:
        OSError: The name is unknown, or no name server answers.
    """
    name = hostname_and_port_of(target)
    if name is None:
        return [Address(target)]
    host, port = name
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of a host: {error}") from error
    preferred = found[0][0]
    ips = list(dict.fromkeys(str(address[0]) for family, *_, address in found if family == preferred))
    if len(ips) == 1:
        return [Address(target, None, ips[0])]
    return [Address(format_host_port(ip, port), host, ip) for ip in ips]


class Resolver:
    """Knows what a client's targets stand for.

    Names are looked up, and a function is asked, in a thread, since neither can be interrupted. No thread waits for the
    next time: a call begins it, so a client without calls asks nothing.
    """

    def __init__(
        self,
        targets: Sequence[str] | Callable[[], Sequence[str]],
        check: Callable[[Sequence[str]], list[str]],
        use: Callable[[list[Address]], object],
    ) -> None:
        """Resolves nothing yet.

        Args:
            targets: The targets, or a function that returns them.
            check: Returns the targets, each once, or raises an error.
            use: Called with the servers, in the order of the targets. It should not keep the client alive.
        """
        self._targets = targets
        self._check = check
        self._use = use
        self._known: dict[str, list[Address]] = {}
        self._mutex = threading.Lock()
        self._current: Future[None] | None = None
        self._started_at = -math.inf
        self._has_logged = False
        self.is_static = not callable(targets) and not any(map(hostname_and_port_of, targets))
        self.due_at = math.inf if self.is_static else -math.inf
        """When a call should begin the next look-up, on the monotonic clock."""

    def failed(self) -> None:
        """Has the next call begin a look-up, since a call has failed: at once, or a second after the last one began."""
        if not self.is_static:
            with self._mutex:
                self.due_at = min(self.due_at, self._started_at + _AFTER_FAILURE_S)

    def resolve(self) -> Future[None]:
        """Begins a look-up, unless one is under way; the result is done, or has an error, when it is."""
        current: Future[None] = Future()
        try:
            with self._mutex:
                if self._current is not None:
                    return self._current
                self._current = current
                now = self._started_at = time.monotonic()
                if not self.is_static:
                    self.due_at = now + _LONGEST_INTERVAL_S * random.uniform(1 - _JITTER, 1)  # noqa: S311 - no secret
            if self.is_static:
                self._look_up(current)
            else:
                try:
                    threading.Thread(target=self._look_up, args=(current,), name="bngrad-lookup", daemon=True).start()
                except RuntimeError:  # the system has no more threads
                    self._look_up(current)
        except BaseException:  # Ctrl-C, perhaps before the look-up has begun
            self._end(current, _interrupted())
            raise
        return current

    def _look_up(self, current: Future[None]) -> None:
        error: Exception | None = _interrupted()
        try:
            self._use(self._found())
            error = None
        except Exception as caught:
            error = caught.with_traceback(None)  # its frames refer to it
        finally:
            self._end(current, error)

    def _end(self, current: Future[None], error: Exception | None) -> None:
        """Ends a look-up, unless Ctrl-C has."""
        with self._mutex:
            if self._current is current:
                self._current = None
        with contextlib.suppress(InvalidStateError):
            if error is None:
                current.set_result(None)
            else:
                current.set_exception(error)

    def _found(self) -> list[Address]:
        known: dict[str, list[Address]] = {}
        for target in self._named():
            try:
                known[target] = lookup(target)
            except OSError:  # keep the addresses known so far; the call itself reports an unknown name
                known[target] = self._known.get(target, [Address(target)])
        self._known = known
        return list(dict.fromkeys(address for addresses in known.values() for address in addresses))

    def _named(self) -> Sequence[str]:
        """Returns the targets; those known so far if the function fails.

        Raises:
            UnavailableError: None are known.
        """
        if not callable(self._targets):
            return self._targets
        try:
            return self._check(self._targets())
        except Exception as error:
            if not self._known:
                raise UnavailableError(f"the function that returns the targets failed: {error}") from None
            if not self._has_logged:
                self._has_logged = True
                logger.warning("the function that returns the targets failed; the last ones are kept: %s", error)
            return list(self._known)


def _interrupted() -> UnavailableError:
    return UnavailableError("the look-up of the servers was interrupted")
