"""The endpoint for large tensors and for clients on this host: the same calls as on grpcio, at a fraction of the cost.

It speaks gRPC by `bngrad_wire.http2`, whose bytes go from the socket into the arena and back without a copy between.
One thread watches all connections, answers the small calls and leads the workers for them: for a call of 4 KB, handing
anything to another thread would cost more than all else. See `bngrad_server.rpc.http2_connections`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from functools import partial
from typing import Any

from bngrad_server.rpc.handshakes import Handshakes
from bngrad_server.rpc.http2_connections import Connections
from bngrad_server.rpc.servicer import Servicer
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.scheduling.dispatch import Dispatcher
from bngrad_server.security.certificates import Certificates

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 1.0
_CREDENTIALS = struct.Struct("3i")


class Http2Port:
    """Listens on sockets of its own."""

    def __init__(self, calls: Servicer, certificates: Certificates | None = None) -> None:
        """Listens to nobody yet.

        Args:
            calls: What to answer.
            certificates: For TLS on TCP ports; None for no TLS.
        """
        self._listeners: list[socket.socket] = []
        self._stopping = threading.Event()
        self._event_loop = EventLoop("poller")
        self._connections = Connections(calls, self._event_loop)
        Dispatcher(self._event_loop, calls.batcher)
        self._handshakes = None
        if certificates is not None:
            renew = partial(self._event_loop.call_soon, self._connections.renew)
            count_failure = partial(calls.observer.metrics.refused_connection, "handshake")
            self._handshakes = Handshakes(certificates, self._add, renew, count_failure)

    def listen_on_port(self, host: str, port: int) -> int:
        """Listens on a TCP port, and returns it.

        Raises:
            OSError: It is taken, or not ours.
        """
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        dualstack = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=dualstack)
        self._listeners.append(listener)
        bound: int = listener.getsockname()[1]
        return bound

    def listen_on_socket(self, listener: socket.socket) -> None:
        """Listens on a socket that is bound already."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Accepts connections."""
        self._event_loop.start()
        if self._handshakes is not None:
            self._handshakes.start()
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="endpoint", daemon=True).start()

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    def stop(self, drain_timeout_s: float) -> None:
        """Takes no more calls, and lets those in flight end in time."""
        self._stopping.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        if self._handshakes is not None:
            self._handshakes.stop()
        if not self._event_loop.is_alive:
            return
        self._event_loop.call_soon(self._connections.drain)
        if not self._connections.ended.wait(drain_timeout_s):
            self._event_loop.call_soon(self._connections.hang_up)
            self._connections.ended.wait(_END_TIMEOUT_S)
        self._event_loop.stop(_END_TIMEOUT_S)
        if self._connections.ended.is_set():
            self._connections.threads.shutdown()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                logger.warning("cannot accept a connection: %s", error)
                time.sleep(0.1)  # out of file descriptors, mostly
                continue
            client = _client_of(connection, address)
            if self._handshakes is not None and connection.family != socket.AF_UNIX:
                self._handshakes.begin(connection, client)
            else:
                self._add(connection, client)

    def _add(self, connection: socket.socket, client: str) -> None:
        self._event_loop.call_soon(partial(self._connections.add, connection, client))


def _client_of(sock: socket.socket, address: Any) -> str:
    """Whom a connection belongs to: see `bngrad_server.rpc_context.RpcContext.client`."""
    if sock.family != socket.AF_UNIX:
        return str(address[0])
    pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return f"process {pid}"
