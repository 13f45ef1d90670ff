"""Reused connections to one address of a server, each for one call at a time."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from bngrad._credentials import Credentials
from bngrad._deadline import ENDLESS, Cancellation, Deadline
from bngrad._shared_memory.quarantine import AbandonedCall
from bngrad._transports.connector import Address, Connector, NotYetConnectedError
from bngrad_wire import http2

_HANDSHAKE_TIMEOUT_S = 5.0
_SHORT_S = 1.0
"""A handshake that had less time than this, by the deadline of its call, may have been given up too early."""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.EAGAIN)
"""Errors that say nothing about the address: no file descriptor is left, or the queue of a Unix socket is full."""
_MAX_IDLE = 64
_FRESH_S = 1e-3
"""A connection that was used within this time is used again without a look whether the server has closed it; if it has,
the call is made again on another one."""


class NotConnectedError(Exception):
    """The server does not answer at this address, or the connection was lost; another transport may make the call."""


class NoConnectionYetError(NotConnectedError):
    """There is no connection in time for this call, but there may be for later ones; another transport makes it."""


class Lent(NamedTuple):
    """A connection that was lent to a call, its socket, and whether it is sure that the server had not closed it."""

    connection: http2.ClientConnection
    sock: socket.socket
    is_open: bool


class _Idle(NamedTuple):
    """A connection without a call, and since when it has been that, on the monotonic clock."""

    connection: http2.ClientConnection
    sock: socket.socket
    since: float


class ConnectionPool:
    """Lends connections to one address.

    Attributes:
        was_connected: Whether there has ever been a connection.
    """

    def __init__(
        self,
        address: Address,
        target: str,
        credentials: Credentials,
        is_lost: Callable[[float], bool] | None = None,
    ) -> None:
        """Connects to nothing yet; ``target`` is the server's name, ``is_lost`` is for its `BufferedSocket`s."""
        self.was_connected = False
        self._address = address
        self._target = target
        self._credentials = credentials
        self._is_lost = is_lost
        self._connector = Connector(address)
        self._mutex = threading.Lock()
        self._idle: list[_Idle] = []
        self._closed = False

    def is_reachable(self) -> bool:
        """Connects, keeps the connection for the next call, and returns whether that worked, or may work for others."""
        try:
            self.give_back(self.lend(ENDLESS, Cancellation()))
        except NotConnectedError as error:
            return isinstance(error, NoConnectionYetError)
        return True

    def lend(self, deadline: Deadline, cancellation: Cancellation, *, must_be_open: bool = True) -> Lent:
        """Lends a connection until `give_back`.

        Args:
            deadline: When to give up.
            cancellation: Lets another thread end the handshake of a new connection.
            must_be_open: Whether to make sure that the server has not closed it.

        Raises:
            NotConnectedError: The server cannot be reached.
        """
        while True:
            with self._mutex:
                if not self._idle:
                    break
                connection, sock, since = self._idle.pop()
            if not must_be_open and time.monotonic() - since < _FRESH_S:
                return Lent(connection, sock, is_open=False)
            if connection.usable:
                return Lent(connection, sock, is_open=True)
            connection.close()
        return self._connected(deadline, cancellation)

    def give_back(self, lent: Lent, abandoned: AbandonedCall | None = None) -> None:
        """Keeps a connection for the next call, or ends it if its call was given up.

        Args:
            lent: The connection.
            abandoned: Takes over the socket of a call that was given up, if any.
        """
        connection = lent.connection
        is_idle = connection.is_idle
        if is_idle and abandoned is not None:
            abandoned.end()
        with self._mutex:
            if is_idle and not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(_Idle(connection, lent.sock, time.monotonic()))
                return
        if is_idle or abandoned is None:
            connection.close()
        else:
            connection.stream = None  # as `close` would do
            abandoned.abandon(lent.sock)

    def close(self) -> None:
        """Closes the idle connections; those that are lent are closed when they are given back."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        self._connector.close()
        for connection, _, _ in idle:
            connection.close()

    def _connected(self, deadline: Deadline, cancellation: Cancellation) -> Lent:
        remaining_s = deadline.remaining_s()
        # Half of what is left, so that another transport may still make the call.
        timeout_s = _HANDSHAKE_TIMEOUT_S if remaining_s is None else min(remaining_s / 2, _HANDSHAKE_TIMEOUT_S)
        is_tcp = isinstance(self._address, tuple)
        try:
            sock = self._connector.connect()
            sock.settimeout(timeout_s)
            secured = self._credentials.secured(sock, cancellation) if is_tcp else sock
        except NotYetConnectedError as error:
            raise NoConnectionYetError(f"{self._address}: {error}") from error
        except OSError as error:
            was_cut_short = isinstance(error, TimeoutError) and timeout_s < _SHORT_S
            kind = NoConnectionYetError if was_cut_short or error.errno in _PASSING else NotConnectedError
            raise kind(f"{self._address}: {error}") from error
        self.was_connected = True
        authority = self._target if is_tcp else "localhost"
        try:
            connection = http2.ClientConnection(secured, authority)
            connection.io.keep_alive()
            connection.io.is_lost = self._is_lost
            return Lent(connection, secured, is_open=True)
        except ConnectionError as error:
            raise NotConnectedError(str(error)) from error
