"""Timeouts of blocking sockets."""

from __future__ import annotations

import socket
import struct

from bngrad_wire.http2.sockets.tls import TlsSocket

_TIMEVAL = struct.Struct("@ll")
_LONGEST_S = 1e9


def set_timeout(sock: socket.socket, timeout_s: float | None) -> None:
    """Bounds every wait for a socket, in seconds; None for no bound.

    Cheaper than ``settimeout``, with which Python makes two system calls of each and releases its lock twice.
    """
    if isinstance(sock, TlsSocket):
        sock.set_timeout(timeout_s)
        return
    if sock.gettimeout() is not None:
        sock.settimeout(None)
    # To the system, zero is no bound.
    microseconds = 0 if timeout_s is None or timeout_s > _LONGEST_S else max(int(timeout_s * 1e6), 1)
    timeval = _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
