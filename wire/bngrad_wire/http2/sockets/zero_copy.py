"""Sends large memory within a host without a copy: the socket refers to its pages until the peer reads them.

So the peer sees what is written there meanwhile. A call ends only after its peer has read all of it, if the peer keeps
the protocol; one that does not could later read memory that is used for something else by then. Hence the peer must be
a process of the same user, which may read this process's memory anyway.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from contextlib import suppress
from io import FileIO
from pathlib import Path

import numpy as np

from bngrad_wire.http2.frames import Buffer

_FROM_NBYTES = 2 * 2**20
"""Smaller pieces are sent in less time by copying them."""
_PIPE_NBYTES = 512 * 1024
"""A larger pipe is hardly faster; by default a user may have 64 MiB of pipes."""
_UNIX_SOCKET_NBYTES = 2**20
"""The buffer of a Unix socket: with a smaller one, sender and peer wait for each other."""
_SPLICE_F_NONBLOCK, _SPLICE_F_MORE = 2, 4
_libc = ctypes.CDLL(None, use_errno=True)
_CREDENTIALS = struct.Struct("@3i")
_MAPPED = bytes(10) + b"\xff\xff"
"""Before an address of IPv4, it makes one of IPv6."""
_TCP_TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class ZeroCopySender:
    """Sends pieces to one socket, by vmsplice(2) into a pipe and splice(2) out of it."""

    def __init__(self, sock: socket.socket) -> None:
        """Opens nothing yet."""
        self._sock = sock
        self._is_possible: bool | None = None  # not known yet
        self._pipe: tuple[FileIO, FileIO] | None = None
        self._left = 0  # of the piece that is being sent
        self._held = 0  # what the pipe holds of it

    def takes(self, piece: Buffer) -> bool:
        """Whether to send a piece, or the rest of one, by `send`.

        Must be asked about large pieces only once the peer has sent something: see `is_own_peer`.
        """
        if self._left or len(piece) < _FROM_NBYTES:
            return self._left > 0
        if self._is_possible is None:
            self._is_possible = is_own_peer(self._sock) and self._has_room() and self._open()
        return self._is_possible

    def send(self, piece: Buffer, *, more: bool) -> int:
        """Sends some of a piece, and returns how many bytes; the next call takes the rest of it.

        Args:
            piece: It must not change until the peer has read it.
            more: Whether more is sent immediately after the piece.

        Raises:
            OSError: As of the socket.
        """
        assert self._pipe is not None
        reader, writer = self._pipe
        self._left = self._left or len(piece)
        try:
            self._fill(writer.fileno(), piece)
        except OSError:  # the memory has no pages to lend, as a device's may have none
            self.close()
            return self._sock.send(piece)
        flags = _SPLICE_F_MORE if more or self._held < len(piece) else 0
        sent = os.splice(reader.fileno(), self._sock.fileno(), self._held, flags=flags)
        self._held -= sent
        self._left -= sent
        return sent

    def close(self) -> None:
        """Closes the pipe."""
        pipe, self._pipe = self._pipe, None
        self._is_possible = False
        self._left = 0
        for end in pipe or ():
            end.close()

    def _has_room(self) -> bool:
        """Enlarges a Unix socket's buffer, and returns whether the system allows it; that of TCP grows by itself."""
        if self._sock.family != socket.AF_UNIX:
            return True
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SOCKET_NBYTES)
        # Linux doubles it, for what it needs itself, if that is not above net.core.wmem_max.
        return self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * _UNIX_SOCKET_NBYTES

    def _open(self) -> bool:
        """Opens the pipe; returns False where the system does not allow it."""
        try:
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            self._pipe = FileIO(read_end), FileIO(write_end, "w")
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
            self._fill(write_end, b"\0")
            self._pipe[0].read(self._held)
            self._held = 0
        except (AttributeError, OSError):  # a sandbox, too few descriptors, or not Linux
            self.close()
            return False
        return True

    def _fill(self, write_end: int, piece: Buffer) -> None:
        """Puts as much of a piece as there is room for into the pipe, after what this holds of it already."""
        if self._held == len(piece):
            return
        address = np.frombuffer(piece, np.uint8).__array_interface__["data"][0]
        rest = _Iovec(address + self._held, len(piece) - self._held)
        added = _libc.vmsplice(write_end, ctypes.byref(rest), 1, _SPLICE_F_NONBLOCK)
        if added < 0 and not self._held:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._held += max(added, 0)  # what is held goes first, then there is room, or the error again


def is_own_peer(sock: socket.socket) -> bool:
    """Whether the other end of a connection is on this host, and of a process of this user.

    Before the other end of a TCP connection is accepted, it seems to be root's.
    """
    with suppress(OSError, ValueError):  # it is gone, or there is no /proc
        if sock.family == socket.AF_UNIX:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return int(_CREDENTIALS.unpack(credentials)[1]) == os.geteuid()
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
