"""Finds out that the host at the other end of a TCP connection has gone, so that it sends no FIN and no RST.

Where nothing is on its way, the system's keepalive does that. What was sent and is not acknowledged the system sends
again for a quarter of an hour. ``TCP_USER_TIMEOUT`` would shorten that, but it also ends a connection to a host that
acknowledges, and does not read for a while, as a busy server does.
"""

from __future__ import annotations

import errno
import socket
import struct

_IDLE_S, _INTERVAL_S, _COUNT = 4, 1, 4
_LOST_AFTER_MS = 1000 * (_IDLE_S + _COUNT * _INTERVAL_S)
_TCP_INFO = struct.Struct("@8B13I")
"""The start of Linux's ``struct tcp_info``."""
_RETRANSMITS, _PROBES, _LAST_ACK_MS = 2, 3, 20
LOST_ERRNOS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH}
"""What the system says of a connection whose other end does not answer."""


def enable(sock: socket.socket, idle_s: int = _IDLE_S, interval_s: int = _INTERVAL_S) -> None:
    """Has the system ask the other end whether it is there when nothing has come for a while.

    Of a listening socket, it does so for the connections that are accepted.

    Args:
        sock: The socket.
        idle_s: For how long.
        interval_s: How long it waits for each of `_COUNT` answers.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _COUNT)


def is_lost(sock: socket.socket) -> bool:
    """Whether the other end has acknowledged nothing for a while, although the system sent again what should be."""
    answer = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(answer) < _TCP_INFO.size:  # QEMU gives programs that it emulates four bytes
        return False
    info: tuple[int, ...] = _TCP_INFO.unpack(answer)
    return info[_LAST_ACK_MS] >= _LOST_AFTER_MS and max(info[_RETRANSMITS], info[_PROBES]) > 1
