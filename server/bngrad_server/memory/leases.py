"""Leases regions of shared memory to clients on this host, by the protocol of `bngrad_wire.lease_protocol`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import selectors
import shutil
import socket
import stat
import threading
import time
from pathlib import Path

from bngrad_server.errors import RegionsFullError, UnauthenticatedError
from bngrad_server.memory.regions import Region, Regions
from bngrad_server.runtime.listening import has_listener
from bngrad_server.security.auth import ALLOW_ALL, Authenticator, local_client
from bngrad_wire.lease_protocol import CALLS, IN_USE, IS_IN_USE, MAX_REQUEST_NBYTES, NOT_IN_USE, REGIONS, unpack_request
from bngrad_wire.token_format import SCHEME

logger = logging.getLogger(__name__)

PARENT = Path("/dev/shm")  # noqa: S108 - what is made here is for its owner alone
_PREFIX = "bngrad-"
_NAME = re.compile(rf"\.?{_PREFIX}[0-9a-f]{{32}}")
"""Of a directory, or of its draft."""
_DRAFT_S = 60.0
"""A draft that is older will never be complete."""
MAX_WITHOUT_LEASE = 256
"""The most connections without a lease; for a further one, the oldest of them is closed."""
_CHECK_S = 1.0
"""How often to look for regions that clients kept after their leases, and keep no longer."""
_REST = 4
"""How many times as long as it has computed the thread rests, so that a flood of requests takes a fifth of a core."""
_LONGEST_REST_S = 0.1
_SO_PASSRIGHTS = 83
"""Linux has it from 6.16 on; Python has no name for it."""


class LeaseServer:
    """A directory with two sockets, for calls and for leases, and the thread that leases regions.

    Attributes:
        directory: Its path.
        calls: The listening socket for calls.
    """

    def __init__(self, regions: Regions, group: str | None, authenticator: Authenticator = ALLOW_ALL) -> None:
        """Makes the directory, for this user alone, or for a group too.

        Raises:
            LookupError: There is no such group.
            OSError: It cannot be made.
        """
        _remove_leftovers()
        self.directory = PARENT / f"{_PREFIX}{secrets.token_hex(16)}"
        # It is renamed once it is complete: another server that starts meanwhile would remove it as a leftover.
        draft = self.directory.with_name(f".{self.directory.name}")
        draft.mkdir(mode=0o700)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(shutil.rmtree, draft, ignore_errors=True)
            if group is not None:
                shutil.chown(draft, group=group)
                draft.chmod(0o750)
            self.calls = on_failure.enter_context(_listen(draft / CALLS, group))
            self._listener = on_failure.enter_context(_listen(draft / REGIONS, group))
            draft.rename(self.directory)
            on_failure.pop_all()
        self._regions = regions
        self._authenticator = authenticator
        self._selector = selectors.DefaultSelector()
        self._leases: dict[socket.socket, Region | None] = {}
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Begins to lease regions, each for the life of a connection."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends every lease and removes the directory."""
        self._waker.close()
        if self._thread.is_alive():
            self._thread.join()
        for client in list(self._leases):
            self._end(client)
        for each in (self._listener, self._wake, self._selector, self.calls):
            each.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self) -> None:
        next_check = worked_s = 0.0
        while True:
            spent_s, worked_s = time.thread_time() - worked_s, time.thread_time()
            time.sleep(min(_REST * spent_s, _LONGEST_REST_S))
            if time.monotonic() >= next_check:
                self._regions.collect()
                next_check = time.monotonic() + _CHECK_S
            for key, _ in self._selector.select(_CHECK_S if self._regions.nbytes else None):
                if key.fileobj is self._wake:
                    return
                try:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._leases:  # not if it was closed by an event before
                        assert isinstance(key.fileobj, socket.socket)
                        self._receive(key.fileobj)
                except (OSError, MemoryError) as error:
                    logger.warning("a lease failed: %r", error)
                    if key.fileobj is self._listener:
                        time.sleep(0.1)  # out of file descriptors, mostly

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setblocking(False)
        without_lease = [other for other, region in self._leases.items() if region is None]
        if len(without_lease) >= MAX_WITHOUT_LEASE:
            self._end(without_lease[0])
        try:
            self._selector.register(client, selectors.EVENT_READ)
        except OSError:
            client.close()
            raise
        self._leases[client] = None

    def _receive(self, client: socket.socket) -> None:
        """Answers a client's message; closes the connection of one that breaks the rules, or has gone."""
        try:
            if not self._answer(client, client.recv(MAX_REQUEST_NBYTES)):
                self._end(client)
        except ConnectionError:
            self._end(client)
        except (OSError, MemoryError):
            self._end(client)
            raise

    def _answer(self, client: socket.socket, message: bytes) -> bool:
        """Leases a region, or says whether it is in use; returns whether the client keeps its connection."""
        leased = self._leases[client]
        if message == IS_IN_USE and leased is not None:
            client.send(IN_USE if leased.holds > 0 else NOT_IN_USE)
            return True
        nbytes, authorization = unpack_request(message)
        is_malformed = authorization != "" and not authorization.startswith(SCHEME)
        if nbytes == 0 or leased is not None or is_malformed:
            return False
        try:
            region = self._regions.lease(nbytes, self._authenticator.authenticate(authorization, local_client(client)))
        except (RegionsFullError, UnauthenticatedError) as error:
            client.send(str(error).encode())
            return False
        self._leases[client] = region
        _hand_over(client, region)
        return True

    def _end(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        client.close()
        region = self._leases.pop(client)
        if region is not None:
            self._regions.end(region)


def _hand_over(client: socket.socket, region: Region) -> None:
    fd = region.open_for_client()
    try:
        socket.send_fds(client, [region.key], [fd])
    finally:
        os.close(fd)


def _listen(path: Path, group: str | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):  # on older systems clients may send descriptors, which can be slow to close
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    listener.bind(str(path))
    path.chmod(0o600)
    if group is not None:
        shutil.chown(path, group=group)
        path.chmod(0o660)
    listener.listen(128)
    return listener


def _remove_leftovers() -> None:
    """Removes the directories of servers of this user that were killed, and their drafts."""
    for directory in PARENT.iterdir():
        with contextlib.suppress(OSError):
            if _NAME.fullmatch(directory.name) and _is_leftover(directory):
                shutil.rmtree(directory)


def _is_leftover(directory: Path) -> bool:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or has_listener(directory / REGIONS):
        return False
    may_be_completed = directory.name.startswith(".") and time.time() - status.st_mtime < _DRAFT_S
    has_only_ours = all(path.name in {CALLS, REGIONS} and path.is_socket() for path in directory.iterdir())
    return has_only_ours and not may_be_completed
