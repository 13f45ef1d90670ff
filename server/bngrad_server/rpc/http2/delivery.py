"""Connections that are to be closed once their clients have the last answer.

What a client sends to a closed connection resets it, and what the client had not received yet would be lost.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import time
from collections.abc import Iterator

from bngrad_server.rpc.http2.connection import Connection

_TIMEOUT_S = 5.0
"""How long nothing of the last answer may reach a client."""
_INT = struct.Struct("@i")


class Deliveries:
    """What such clients do not have yet; for the event loop's thread."""

    def __init__(self) -> None:
        self._all: dict[Connection, tuple[int, float]] = {}  # how many bytes, and since when they are as many

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._all))

    def is_over(self, connection: Connection) -> bool:
        """Whether a client has everything, or has received nothing for too long; else it is to be asked for again."""
        nbytes, now = connection.http.unsent_nbytes + _undelivered_nbytes(connection), time.monotonic()
        before, since = self._all.get(connection, (nbytes, now))
        if nbytes != before:
            since = now
        self._all[connection] = nbytes, since
        return not nbytes or now - since > _TIMEOUT_S

    def discard(self, connection: Connection) -> None:
        """Forgets a connection, which is closed."""
        self._all.pop(connection, None)


def _undelivered_nbytes(connection: Connection) -> int:
    """Returns how many bytes were sent that the client's host does not have yet; 0 if it is gone."""
    # What was sent to a Unix socket is in the client's already.
    if connection.sock.family == socket.AF_UNIX or connection.http.io.broken is not None:
        return 0
    poll = select.poll()
    poll.register(connection.fd, 0)
    if poll.poll(0):
        return 0
    nbytes: int = _INT.unpack(fcntl.ioctl(connection.fd, termios.TIOCOUTQ, bytes(_INT.size)))[0]
    return nbytes
