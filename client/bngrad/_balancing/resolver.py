"""The addresses of servers, and the names that stand for several."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from bngrad._errors import FieldViolation, invalid_argument, is_encodable

_HOST_AND_PORT = re.compile(r"(?:dns:(?:///)?)?(\[[^\]\s]+\]|[^:/\[\]\s]+):([0-9]{1,9})")
_SCHEMES = ("dns", "google-c2p", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
"""Of gRPC's own targets; what has another one it takes for a host, and adds a port of its own."""
_LONGEST_PATH_NBYTES = 107
_BETWEEN_LOOKUPS_S = 30.0


def check_targets(target: str | Sequence[str]) -> list[str]:
    """The targets, if they look like some; each once."""
    targets = [target] if isinstance(target, str) else target
    if isinstance(targets, bytes) or not isinstance(targets, Sequence):
        raise TypeError(f"target must be a str, not {target!r}, or a sequence of such")
    for each in targets:
        if not isinstance(each, str):
            raise TypeError(f"target must be a str, not {each!r}")
        if not _is_target(each):
            description = f'target must be "HOST:PORT" or "unix:PATH", not {each!r}'
            raise invalid_argument(FieldViolation("target", description))
        if each.startswith("unix:") and len(each[5:].removeprefix("//").encode()) > _LONGEST_PATH_NBYTES:
            description = f"target must have a path of at most {_LONGEST_PATH_NBYTES} bytes, not {each!r}"
            raise invalid_argument(FieldViolation("target", description))
    if not targets:
        raise invalid_argument(FieldViolation("target", "target must name a server, not none"))
    return list(dict.fromkeys(targets))


def _is_target(target: str) -> bool:
    """Whether gRPC takes it as it is meant, and not for some other host, port or path."""
    if "\0" in target or not is_encodable(target):
        return False
    place = host_and_port(target)
    if place is not None:
        return 0 < place[1] < 2**16
    scheme, _, rest = target.partition(":")
    return scheme in _SCHEMES and rest.strip("/") != ""


def host_and_port(target: str) -> tuple[str, int] | None:
    """The host, without brackets, and the port of a target that has them."""
    match = _HOST_AND_PORT.fullmatch(target)
    return None if match is None else (match[1].strip("[]"), int(match[2]))


def name_of(target: str) -> tuple[str, int] | None:
    """The host's name and the port of a target that may stand for several addresses."""
    place = host_and_port(target)
    if place is None:
        return None
    try:
        ipaddress.ip_address(place[0].partition("%")[0])
    except ValueError:
        return place
    return None


def lookup(target: str) -> list[str]:
    """The targets that a target stands for: itself, unless it is a name of several addresses.

    Only the kind of addresses that the system prefers counts, since most hosts with two kinds have one of each.

    Raises:
        OSError: The name is not known, or nobody can be asked.
    """
    name = name_of(target)
    if name is None:
        return [target]
    host, port = name
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of a host: {error}") from error
    family = found[0][0]
    addresses = dict.fromkeys(str(place[0]) for kind, *_, place in found if kind == family)
    if len(addresses) == 1:
        return [target]
    return [f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}" for address in addresses]


class Resolver:
    """Keeps what targets stand for; names are looked up in a thread, since nothing can end a lookup.

    Attributes:
        has_names: Whether there is anything to look up.
        first: Ends with the first lookup.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        """Looks nothing up yet.

        Args:
            targets: What may stand for several addresses each.
        """
        self._stands_for = {target: [target] for target in targets}
        self.has_names = any(name_of(target) for target in targets)
        self._mutex = threading.Lock()
        self._asked_at: float | None = None
        self.first: Future[None] = Future()

    def ask(self, use: Callable[[list[str]], None]) -> None:
        """Begins a lookup, unless there is nothing to look up or there was one a moment ago.

        Args:
            use: Is told what the targets stand for.
        """
        with self._mutex:
            now = time.monotonic()
            if self._asked_at is not None and (not self.has_names or now < self._asked_at + _BETWEEN_LOOKUPS_S):
                return
            self._asked_at = now
        if self.has_names:
            threading.Thread(target=self._look_up, args=(use,), name="bngrad-lookup", daemon=True).start()
        else:
            self._tell(use)

    def name_behind(self, address: str) -> str | None:
        """The host's name that an address was found by; None for one that was given as it is."""
        for target, addresses in self._stands_for.items():
            if address in addresses:
                name = name_of(target)
                return None if name is None or address == target else name[0]
        return None

    def _look_up(self, use: Callable[[list[str]], None]) -> None:
        for target in self._stands_for:
            try:
                self._stands_for[target] = lookup(target)
            except OSError:  # What was known of it stays; an unknown name is reported by the call itself.
                continue
        self._tell(use)

    def _tell(self, use: Callable[[list[str]], None]) -> None:
        try:
            use(list(dict.fromkeys(each for several in self._stands_for.values() for each in several)))
        except Exception as error:
            if self.first.done():
                raise
            self.first.set_exception(error)
        else:
            if not self.first.done():
                self.first.set_result(None)
