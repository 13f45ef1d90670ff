"""The end of a connection: its client hears of it, the calls that it has end, and the last answer is delivered.

What a client sends to a closed connection resets it, and what the client had not received yet would be lost.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Container, Iterator

from bngrad_server.rpc.http2.connection import Connection

_GOAWAY_TIMEOUT_S = 2.0
"""How long a client may take to learn that it may begin no more calls."""
_TIMEOUT_S = 5.0
"""How long nothing of the last answer may reach a client."""
_INT = struct.Struct("@i")


class Endings:
    """The connections that are to be closed; for the event loop's thread."""

    def __init__(
        self,
        idle: Container[Connection],
        settle: Callable[[Connection], None],
        stop_reading: Callable[[Connection], None],
        close: Callable[[Connection], None],
    ) -> None:
        """Ends none yet.

        Args:
            idle: The connections without a call.
            settle: Sends what a connection with several calls has to send, and closes it if it is broken.
            stop_reading: Reads from a connection no more.
            close: Closes a connection.
        """
        self._idle = idle
        self._settle = settle
        self._stop_reading = stop_reading
        self._close = close
        self._announced: dict[Connection, float] = {}  # until when each waits for its client to hear of its end
        self._deliveries = Deliveries()

    def is_announced(self, connection: Connection) -> bool:
        """Whether a client may still begin calls, as it may not have heard yet that the connection ends."""
        return connection in self._announced

    def is_delivering(self, connection: Connection) -> bool:
        """Whether a connection only waits until its client has the last answer."""
        return connection in self._deliveries

    def announce(self, connection: Connection) -> None:
        """Ends a connection after the calls that it has, and those that its client has begun already."""
        if connection.http.is_multiplexed and not connection.is_outdated:
            connection.is_outdated = True
            self._announced[connection] = time.monotonic() + _GOAWAY_TIMEOUT_S
            connection.http.announce_goaway()
            self._settle(connection)
        elif connection not in self._announced:
            self.after_calls(connection)

    def if_heard(self, connection: Connection) -> None:
        """Ends a connection once its client has heard that it will; to be called after frames of it."""
        if connection in self._announced and connection.http.knows_goaway:
            self.after_calls(connection)

    def after_calls(self, connection: Connection) -> None:
        """Ends a connection after the calls that it has; refuses those that its client begins before it knows."""
        connection.is_outdated = True
        self._announced.pop(connection, None)
        if connection.http.is_multiplexed:
            connection.http.goaway()
        if connection in self._idle:
            self.once_delivered(connection)
        elif connection.lanes:
            self._settle(connection)

    def once_delivered(self, connection: Connection) -> None:
        """Closes a connection without a call once its client has the last answer; does not read from it until then."""
        try:
            connection.http.flush()
        except ConnectionError:
            self._close(connection)
            return
        if self._deliveries.is_over(connection):
            self._close(connection)
        else:
            self._stop_reading(connection)

    def tick(self) -> None:
        """Does what is due; to be called several times a second."""
        for connection in self._deliveries:
            self.once_delivered(connection)
        now = time.monotonic()
        for connection in [connection for connection, until in self._announced.items() if until <= now]:
            self.after_calls(connection)

    def discard(self, connection: Connection) -> None:
        """Forgets a connection, which is closed."""
        self._announced.pop(connection, None)
        self._deliveries.discard(connection)


class Deliveries:
    """What clients do not have yet of their last answers."""

    def __init__(self) -> None:
        self._all: dict[Connection, tuple[int, float]] = {}  # how many bytes, and since when they are as many

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._all

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
