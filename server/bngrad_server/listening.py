"""What grpcio does not know or say of addresses to listen on."""

from __future__ import annotations

import errno
import resource
import socket
from pathlib import Path

_MAX_CONNECTIONS = 8192
"""To an address of grpcio's; each takes about 40 KB before it has said anything."""
_OTHER_DESCRIPTORS = 2048
_MOST_DESCRIPTORS = 1 << 16


class ListenError(Exception):
    """An address cannot be listened on."""


def raise_descriptor_limit() -> None:
    """Has this process, and its workers, open as many files as it may: the usual limit is meant for `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MOST_DESCRIPTORS):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MOST_DESCRIPTORS), hard))


def max_connections(addresses: int) -> int:
    """How many connections each of grpcio's addresses takes, so that there are descriptors for all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MAX_CONNECTIONS, max(soft - _OTHER_DESCRIPTORS, soft // 2) // addresses)


def socket_path(address: str) -> Path | None:
    """The path of ``unix:PATH``; None for ``HOST:PORT``."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def check_socket(path: Path) -> None:
    """Makes sure that nobody listens on a Unix socket: grpcio would take its path away from them.

    Raises:
        ListenError: Somebody does.
    """
    if is_answered(path):
        raise ListenError(f"cannot listen on unix:{path}: the address is taken")


def is_answered(path: Path) -> bool:
    """Whether somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # A queue that is full says so at once.
        try:
            found = probe.connect_ex(str(path))
        except OSError:  # The path is longer than a socket's may be.
            return False
    return found not in {errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED}


def why_not(address: str) -> str:
    """Why an address cannot be listened on."""
    path = socket_path(address)
    try:
        if path is not None:
            return f"there is no folder {path.parent}" if not path.parent.is_dir() else "it is no path for a socket"
        host, _, port = address.rpartition(":")
        family, kind, *_, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return str(error.strerror)
    return "the address is taken, malformed or not ours"
