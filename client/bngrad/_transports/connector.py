"""Connects to an address beside calls, never before them: a call waits a moment at most."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from typing import Any, NamedTuple, TypeAlias

Address: TypeAlias = tuple[str, int] | str
_Place: TypeAlias = tuple[socket.AddressFamily, Any]

WAIT_S = 0.02
"""How long a call waits for a connection, and before that for the address of a name; then it goes another way."""
_TIMEOUT_S = 2.0
"""How long a connection may take, without a call that waits for it: the system asks twice."""


class NotYetConnectedError(OSError):
    """The connection is still being made, and is there for a later call."""


class _Pending(NamedTuple):
    """A connection that is being made to the place with a number, until a time on the monotonic clock."""

    sock: socket.socket
    until: float
    number: int


class Connector:
    """Makes connections to one address: host and port, or the path of a Unix socket.

    If one takes longer than a call waits, later calls see whether it is there by now, and no other one is begun.
    """

    def __init__(self, address: Address) -> None:
        """Connects to nothing yet."""
        self._address = address
        self._mutex = threading.Lock()
        self._places: list[_Place] = _places_of(address)
        self._lookup: _Lookup | None = None
        self._pending: _Pending | None = None
        self._is_slow = False

    def connect(self) -> socket.socket:
        """Returns a connected socket.

        Raises:
            NotYetConnectedError: It takes longer than a call waits; a later call may get it.
            OSError: There is no connection to be had.
        """
        try:
            with self._mutex:
                pending, self._pending = self._pending, None
                if pending is None and self._is_slow:
                    raise NotYetConnectedError("another call looks after the connection")
            sock = self._connected(pending)
            self._is_slow = False
            return sock
        except NotYetConnectedError:
            raise
        except BaseException:  # also Ctrl-C, or later calls would wait for this one
            self._is_slow = False
            raise

    def close(self) -> None:
        """Ends the connection that is being made, if any."""
        with self._mutex:
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.sock.close()

    def _connected(self, pending: _Pending | None) -> socket.socket:
        places = self._places
        if not places and pending is None:
            places = self._looked_up()
        number = 0 if pending is None else pending.number
        while True:
            try:
                if pending is None:
                    pending = _Pending(_begun(*places[number]), time.monotonic() + _TIMEOUT_S, number)
                    is_there = _is_connected(pending.sock, WAIT_S)
                else:
                    is_there = _is_connected(pending.sock, 0.0)
                if is_there:
                    return pending.sock
                if time.monotonic() >= pending.until:
                    raise TimeoutError(f"no connection within {_TIMEOUT_S:.0f} s")
            except BaseException as error:
                if pending is not None:
                    pending.sock.close()
                    pending = None
                number += 1
                if number >= len(places) or not isinstance(error, OSError):
                    self._places = _places_of(self._address)  # a name may have another address by now
                    raise
            else:
                self._keep(pending)
                raise NotYetConnectedError(f"no connection within {WAIT_S} s")

    def _keep(self, pending: _Pending) -> None:
        with self._mutex:
            self._is_slow = True
            if self._pending is None:
                self._pending = pending
                return
        pending.sock.close()

    def _looked_up(self) -> list[_Place]:
        assert isinstance(self._address, tuple)
        with self._mutex:
            is_first = self._lookup is None
            lookup = self._lookup = self._lookup or _Lookup(self._address)
        if not lookup.done.wait(WAIT_S if is_first else 0):
            raise NotYetConnectedError("the name is still being looked up")
        self._lookup = None
        if lookup.error is not None:
            raise lookup.error
        self._places = lookup.places
        return self._places


class _Lookup:
    """The look-up of a name, in a thread since it cannot be interrupted."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.done = threading.Event()
        self.places: list[_Place] = []
        self.error: OSError | None = None
        self._address = address
        try:
            threading.Thread(target=self._run, name="bngrad-lookup", daemon=True).start()
        except RuntimeError as error:
            raise NotYetConnectedError("the system has no thread for the look-up") from error

    def _run(self) -> None:
        try:
            self.places = _resolved(self._address)
        except Exception as error:  # also a lack of memory, or calls would wait for this look-up for good
            self.error = OSError(f"{self._address[0]}: {error}")
        self.done.set()


def _places_of(address: Address) -> list[_Place]:
    """Returns where to connect to; nothing if a name must be looked up."""
    if isinstance(address, str):
        return [(socket.AF_UNIX, address)]
    try:
        return _resolved(address, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []


def _resolved(address: tuple[str, int], flags: int = 0) -> list[_Place]:
    host, port = address
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, place) for family, *_, place in found]


def _begun(family: socket.AddressFamily, place: Any) -> socket.socket:
    sock = socket.socket(family)
    try:
        sock.setblocking(False)
        error = sock.connect_ex(place)
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
    except BaseException:
        sock.close()
        raise
    return sock


def _is_connected(sock: socket.socket, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(1e3 * wait_s):
        return False
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    return True
