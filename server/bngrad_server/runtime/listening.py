"""Checks addresses before grpcio listens on them, and limits descriptors and connections."""

from __future__ import annotations

import errno
import os
import resource
import socket
import tempfile
from pathlib import Path

from bngrad_server.errors import ListenError
from bngrad_wire.addresses import host_and_port, unix_path

_MAX_CONNECTIONS = 8192
"""For each address of grpcio; each connection takes about 40 KB before its first byte."""
_OTHER_DESCRIPTORS = 2048
_MOST_DESCRIPTORS = 1 << 16
_MAX_PATH_NBYTES = 107


def raise_descriptor_limit() -> None:
    """Raises the limit of open files of this process and its workers: the usual soft limit is meant for `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _MOST_DESCRIPTORS):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _MOST_DESCRIPTORS), hard))


def max_connections(addresses: int) -> int:
    """Returns how many connections each address of grpcio may take, which leaves descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MAX_CONNECTIONS, max(soft - _OTHER_DESCRIPTORS, soft // 2) // addresses)


def check_address(address: str) -> None:
    """Checks that the server can listen on an address.

    grpcio would write the reason to stderr itself, and would replace the Unix socket of another server.

    Raises:
        ListenError: It cannot.
    """
    path = unix_path(address)
    reason = _port_fault(address) if path is None else _path_fault(Path(path))
    if reason is not None:
        raise ListenError(f"cannot listen on {address}: {reason}")


def has_listener(path: Path) -> bool:
    """Tells whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # or a full queue would block
        try:
            found = probe.connect_ex(str(path))
        except OSError:  # the path is too long for a socket
            return False
    return found not in {errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED}


def _path_fault(path: Path) -> str | None:
    if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        return f"a socket's path has at most {_MAX_PATH_NBYTES} bytes"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.exists() and not path.is_socket():
        return "the path exists and is not a socket"
    if has_listener(path):
        return "the address is taken"
    try:  # at a name beside it, so that the socket of a server that starts at this moment stays
        with tempfile.TemporaryDirectory(dir=path.parent):
            return None
    except OSError as error:
        return f"no socket can be made in {path.parent}: {error.strerror}"


def _port_fault(address: str) -> str | None:
    """Returns why no address of a host can be listened on; None if one can."""
    place = host_and_port(address)
    assert place is not None
    reason = None
    try:
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror
    except UnicodeError:
        return "it names no host"
    for family, kind, _, _, bound in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(bound)
        except OSError as error:
            reason = error.strerror
        else:
            return None
    return reason
