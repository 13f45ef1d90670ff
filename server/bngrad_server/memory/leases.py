"""What clients on this host find in shared memory's file system: a directory with two sockets.

``calls`` takes the same calls as every endpoint. ``regions`` leases memory: a client connects, sends a size as 8 bytes,
little-endian, followed at once by the value of its ``authorization`` header if it has a token, and gets the region's
key, 16 bytes, with the descriptor of its file; or a sentence why not. The lease ends with the connection. Meanwhile the
client may ask by a question mark whether any request still names the region, and is told so by one byte, 1 or 0: what a
request that timed out was to write may still be written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import shutil
import socket
import struct
import threading
import time
from pathlib import Path

from bngrad_server.errors import RegionsFullError, UnauthenticatedError
from bngrad_server.memory.regions import Region, Regions
from bngrad_server.runtime.listening import has_listener
from bngrad_server.security.auth import ALLOW_ALL, Authenticator

logger = logging.getLogger(__name__)

PARENT = Path("/dev/shm")  # noqa: S108 - what is made in here is for its owner alone
_PREFIX = "bngrad-"
_SIZE = struct.Struct("<Q")
IS_IN_USE = b"?"
_SCHEME = "Bearer "
_LONGEST_AUTHORIZATION = 4096
_MAX_WITHOUT_LEASE = 256
"""Connections; for more, the first of them is closed."""
_SO_PASSRIGHTS = 83
"""Of Linux from 6.16 on; Python has no name for it."""


class LeaseServer:
    """The directory, until `close`.

    Attributes:
        directory: Its path.
        calls: The listening socket for calls.
    """

    def __init__(self, regions: Regions, group: str | None, guard: Authenticator = ALLOW_ALL) -> None:
        """Makes the directory, for this user alone, or for a group too.

        Args:
            regions: What to lease from.
            group: The name of the group.
            guard: Says who may lease.

        Raises:
            LookupError: There is no such group.
            OSError: It cannot be made.
        """
        _remove_leftovers()
        self.directory = PARENT / f"{_PREFIX}{secrets.token_hex(16)}"
        # Renamed once it is complete: another server that starts meanwhile would take it for a leftover.
        draft = self.directory.with_name(f".{self.directory.name}")
        draft.mkdir(mode=0o700)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(shutil.rmtree, draft, ignore_errors=True)
            if group is not None:
                shutil.chown(draft, group=group)
                draft.chmod(0o750)
            self.calls = on_failure.enter_context(_listen(draft / "calls", group))
            leases = on_failure.enter_context(_listen(draft / "regions", group))
            draft.rename(self.directory)
            on_failure.pop_all()
        self._leases = _Leases(regions, leases, guard)

    def start(self) -> None:
        """Leases regions from now on."""
        self._leases.start()

    def close(self) -> None:
        """Ends every lease and removes the directory."""
        self._leases.close()
        self.calls.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class _Leases:
    """The thread that leases regions, each for the life of a connection."""

    def __init__(self, regions: Regions, listener: socket.socket, guard: Authenticator) -> None:
        self._regions = regions
        self._guard = guard
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._leases: dict[socket.socket, Region | None] = {}
        self._wake, self._waker = socket.socketpair()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._waker.close()
        if self._thread.is_alive():
            self._thread.join()
        for client in list(self._leases):
            self._end(client)
        for each in (self._listener, self._wake, self._selector):
            each.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    return
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._leases:  # still
                        assert isinstance(key.fileobj, socket.socket)
                        self._hear(key.fileobj)
                except OSError as error:
                    logger.warning("a lease failed: %s", error)
                    if key.fileobj is self._listener:
                        time.sleep(0.1)  # out of file descriptors, mostly

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setblocking(False)
        without_lease = [other for other, region in self._leases.items() if region is None]
        if len(without_lease) >= _MAX_WITHOUT_LEASE:
            self._end(without_lease[0])
        self._leases[client] = None
        self._selector.register(client, selectors.EVENT_READ)

    def _hear(self, client: socket.socket) -> None:
        """Leases a region to a client that asks for the first time, and ends with one that says anything unknown."""
        leased = self._leases[client]
        try:
            message = client.recv(_SIZE.size + _LONGEST_AUTHORIZATION)
            if message == IS_IN_USE and leased is not None:
                client.send(bytes([leased.holds > 0]))
                return
            size, authorization = message[: _SIZE.size], message[_SIZE.size :].decode(errors="replace")
            (nbytes,) = _SIZE.unpack(size) if len(size) == _SIZE.size else (0,)
            is_odd = authorization != "" and not authorization.startswith(_SCHEME)
            if nbytes == 0 or leased is not None or is_odd:
                self._end(client)
                return
            self._guard.authenticate(authorization, "")
            region = self._regions.lease(nbytes)
        except (RegionsFullError, UnauthenticatedError) as error:
            client.send(str(error).encode())
            self._end(client)
        except OSError:
            self._end(client)
            raise
        else:
            self._leases[client] = region
            socket.send_fds(client, [region.key], [region.fd])

    def _end(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        client.close()
        region = self._leases.pop(client)
        if region is not None:
            self._regions.end(region)


def _listen(path: Path, group: str | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):  # older systems take descriptors, and to close one may take its owner's time
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    listener.bind(str(path))
    path.chmod(0o600)
    if group is not None:
        shutil.chown(path, group=group)
        path.chmod(0o660)
    listener.listen(128)
    return listener


def _remove_leftovers() -> None:
    """Removes the directories of servers of this user that were killed."""
    for directory in PARENT.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_uid == os.getuid() and not has_listener(directory / "regions"):
                shutil.rmtree(directory)
