"""Resolves targets into the addresses of servers."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from bngrad._validation import host_and_port_of
from bngrad_wire.addresses import format_host_port

_BETWEEN_LOOKUPS_S = 30.0


def hostname_and_port_of(target: str) -> tuple[str, int] | None:
    """Returns the host name and port of a target; None if it names no host, or an IP address."""
    host_and_port = host_and_port_of(target)
    if host_and_port is None:
        return None
    try:
        ipaddress.ip_address(host_and_port[0].partition("%")[0])
    except ValueError:
        return host_and_port
    return None


def lookup(target: str) -> list[str]:
    """Returns the targets that a target stands for: itself, unless it is a name with several addresses.

    Only addresses of the family that the system prefers count, since most hosts with both have one address of each.

    Raises:
        OSError: The name is unknown, or no name server answers.
    """
    name = hostname_and_port_of(target)
    if name is None:
        return [target]
    host, port = name
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of a host: {error}") from error
    preferred = found[0][0]
    addresses = dict.fromkeys(str(address[0]) for family, *_, address in found if family == preferred)
    if len(addresses) == 1:
        return [target]
    return [format_host_port(address, port) for address in addresses]


class Resolver:
    """Knows what a client's targets stand for; looks names up in a thread, since a lookup cannot be interrupted.

    Attributes:
        has_names: Whether any target is a name to be looked up.
        first: Done once the first lookup is.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        """Looks nothing up yet."""
        self._resolved = {target: [target] for target in targets}
        self.has_names = any(hostname_and_port_of(target) for target in targets)
        self._mutex = threading.Lock()
        self._started_at: float | None = None
        self.first: Future[None] = Future()

    def resolve(self, use: Callable[[list[str]], None]) -> None:
        """Starts a lookup, unless there are no names or the last lookup was less than 30 s ago.

        Args:
            use: Called with the addresses, in the order of the targets.
        """
        with self._mutex:
            now = time.monotonic()
            if self._started_at is not None and (not self.has_names or now < self._started_at + _BETWEEN_LOOKUPS_S):
                return
            self._started_at = now
        if self.has_names:
            threading.Thread(target=self._look_up, args=(use,), name="bngrad-lookup", daemon=True).start()
        else:
            self._report(use)

    def hostname_of(self, address: str) -> str | None:
        """Returns the host name that an address was resolved from; None for an address that is a target itself."""
        for target, addresses in self._resolved.items():
            if address in addresses:
                name = hostname_and_port_of(target)
                return None if name is None or address == target else name[0]
        return None

    def _look_up(self, use: Callable[[list[str]], None]) -> None:
        for target in self._resolved:
            try:
                self._resolved[target] = lookup(target)
            except OSError:  # Keep the addresses known so far; the call itself reports an unknown name.
                continue
        self._report(use)

    def _report(self, use: Callable[[list[str]], None]) -> None:
        try:
            use(list(dict.fromkeys(address for addresses in self._resolved.values() for address in addresses)))
        except Exception as error:
            if self.first.done():
                raise
            self.first.set_exception(error)
        else:
            if not self.first.done():
                self.first.set_result(None)
