"""Who is at the other end of a connection."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_CREDENTIALS = struct.Struct("@3i")
_MAPPED = bytes(10) + b"\xff\xff"
"""Before an address of IPv4, it makes one of IPv6."""
_TCP_TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")


def credentials_of(sock: socket.socket) -> tuple[int, int, int]:
    """Returns the ids of process, user and group at the other end of a Unix socket."""
    found: tuple[int, int, int] = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return found


def is_own_peer(sock: socket.socket) -> bool:
    """Whether the other end of a connection is on this host, and of a process of this user.

    Before the other end of a TCP connection is accepted, it seems to be root's.
    """
    with suppress(OSError, ValueError):  # it is gone, or there is no /proc
        if sock.family == socket.AF_UNIX:
            return credentials_of(sock)[1] == os.geteuid()
        theirs, ours = _places(sock.family, sock.getpeername()), _places(sock.family, sock.getsockname())
        ends = list(zip(theirs, ours, strict=True))
        for table in _TCP_TABLES:
            for line in table.read_text().splitlines()[1:]:
                _, local, remote, _, _, _, _, user, *_ = line.split()
                if (local, remote) in ends:
                    return int(user) == os.geteuid()
    return False


def _places(family: int, name: tuple[str, int]) -> list[str]:
    """Writes address and port as proc(5) does, where a socket of IPv6 may have accepted a connection of IPv4."""
    host, port = name[:2]
    packed = socket.inet_pton(family, host)
    addresses = [packed] if family == socket.AF_INET6 else [packed, _MAPPED + packed]
    words = [struct.unpack(f"={len(address) // 4}I", address) for address in addresses]
    return ["".join(f"{word:08X}" for word in each) + f":{port:04X}" for each in words]
