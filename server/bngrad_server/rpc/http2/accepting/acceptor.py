"""Accepts the connections of listening sockets, a few in each turn of an event loop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial

from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.security.auth import local_client

logger = logging.getLogger(__name__)

_ACCEPTED_PER_TURN = 4


class Acceptor:
    """The listening sockets; for the event loop's thread, but for `listen`."""

    def __init__(self, event_loop: EventLoop, on_accept: Callable[[socket.socket, str], object]) -> None:
        """Accepts nothing yet; calls back with each connection and its client, see `RpcContext.client`."""
        self._event_loop = event_loop
        self._on_accept = on_accept
        self._listeners: list[socket.socket] = []
        self._waiting: list[socket.socket] = []

    def listen(self, listener: socket.socket) -> None:
        """Takes a listening socket, which it closes in the end; to be called before the event loop starts."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._waiting.append(listener)

    def resume(self) -> None:
        """Accepts from the listeners that are new, or for which there were no file descriptors left."""
        while self._waiting:
            listener = self._waiting[0]
            try:
                self._event_loop.add_priority_reader(listener.fileno(), partial(self._accept, listener))
            except OSError as error:  # no memory, or too many descriptors are watched
                logger.warning("cannot watch a listening socket: %s", error)
                return
            del self._waiting[0]

    def close(self) -> None:
        """Closes the listeners."""
        for listener in self._listeners:
            self._event_loop.remove_priority_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        self._waiting.clear()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # mostly, there are no file descriptors left
                logger.warning("cannot accept a connection: %s", error)
                self._event_loop.remove_priority_reader(listener.fileno())
                self._waiting.append(listener)  # until `resume`
                return
            self._on_accept(sock, local_client(sock) if sock.family == socket.AF_UNIX else str(address[0]))
