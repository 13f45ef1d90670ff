"""The addresses of servers: ``HOST:PORT``, an IPv6 host in brackets, and ``unix:PATH``."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from urllib.parse import quote

MAX_PORT = 2**16 - 1
MAX_PATH_NBYTES = 107
"""Of the path of a Unix socket, see unix(7)."""
_UNIX = "unix:"
_READY = re.compile(r"bngrad \S+ ready on ([^\s,]+?)[,:] ")
_HOST_AND_PORT = re.compile(r"(\[[^\]\s]+\]|[^:/\[\]\s]+):([0-9]{1,9})")


def unix_path(address: str) -> str | None:
    """Returns the path of ``unix:PATH`` or ``unix:///PATH``; None for any other address."""
    if not address.startswith(_UNIX):
        return None
    path = address.removeprefix(_UNIX)
    return path.removeprefix("//") if path.startswith("///") else path


def host_and_port(address: str) -> tuple[str, int] | None:
    """Returns the host, without brackets, and the port of ``HOST:PORT``; None for any other address.

    The port may be 0 or above `MAX_PORT`; what is allowed depends on the use.
    """
    match = _HOST_AND_PORT.fullmatch(address)
    return None if match is None else (match[1].strip("[]"), int(match[2]))


def format_host_port(host: str, port: int) -> str:
    """Returns ``HOST:PORT``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def grpcio_address(address: str) -> str:
    """Returns an address as grpcio takes it, which decodes percent escapes in a path."""
    path = unix_path(address)
    return address if path is None else _UNIX + quote(os.fsencode(path))


def ready_line(version: str, addresses: Sequence[str], devices: str) -> str:
    """Returns the line that ``bngrad serve`` prints to its standard output once it is ready."""
    return f"bngrad {version} ready on {', '.join(addresses)}: {devices}\n"


def ready_address(line: str) -> str | None:
    """Returns the first address in a `ready_line`, which must be without blanks and commas; None for another line."""
    found = _READY.match(line)
    return None if found is None else found[1]


def is_local(address: str) -> bool:
    """Tells whether only this host can reach an address: a Unix socket, ``localhost`` or a loopback address."""
    if unix_path(address) is not None:
        return True
    place = host_and_port(address)
    if place is None:
        return False
    try:
        return ipaddress.ip_address(place[0]).is_loopback
    except ValueError:
        return place[0] == "localhost"
