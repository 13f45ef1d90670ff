"""What grpcio does not know or say of addresses to listen on."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path

from bngrad_server.errors import ListenError

_MAX_CONNECTIONS = 8192
"""To an address of grpcio's; each takes about 40 KB before it has said anything."""
_OTHER_DESCRIPTORS = 2048
_MOST_DESCRIPTORS = 1 << 16
_MAX_PATH_NBYTES = 107


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


def check_address(address: str) -> None:
    """Makes sure that an address can be listened on.

    grpcio would say why not in lines of its own, and take the path of a Unix socket away from who listens there.

    Raises:
        ListenError: It cannot be listened on.
    """
    path = socket_path(address)
    reason = _why_not_port(address) if path is None else _why_not_path(path)
    if reason is not None:
        raise ListenError(f"cannot listen on {address}: {reason}")


def is_answered(path: Path) -> bool:
    """Whether somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # A queue that is full says so at once.
        try:
            found = probe.connect_ex(str(path))
        except OSError:  # The path is longer than a socket's may be.
            return False
    return found not in {errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED}


def _why_not_path(path: Path) -> str | None:
    if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        return f"a socket's path has at most {_MAX_PATH_NBYTES} bytes"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.exists() and not path.is_socket():
        return "it is there, and no socket"
    return "the address is taken" if is_answered(path) else None


def _why_not_port(address: str) -> str | None:
    """Why none of the addresses that a name stands for can be listened on."""
    host, _, port = address.rpartition(":")
    reason = None
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror
    except UnicodeError:
        return "it names no host"
    for family, kind, _, _, place in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            reason = error.strerror
        else:
            return None
    return reason
