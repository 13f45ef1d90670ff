"""The HTTP/2 port, which serves every gRPC client: at each address to listen on, and on a socket for shared memory.

It speaks gRPC by `bngrad_wire.http2`, which moves bytes between the socket and the arena without a copy. One thread
runs the event loop: it reads from all connections, answers small calls and dispatches their batches to the workers,
since for a call of 4 KB a hop to another thread costs more than everything else together.
"""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

from bngrad_server.rpc.health import Health
from bngrad_server.rpc.http2.accepting.strangers import Strangers
from bngrad_server.rpc.http2.calls import Http2Calls
from bngrad_server.rpc.other_calls import OtherCalls
from bngrad_server.rpc.servicer import Servicer
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.runtime.listening import tcp_listeners, unix_listener
from bngrad_server.scheduling.dispatch import Dispatcher
from bngrad_server.security.certificates import Certificates

_END_TIMEOUT_S = 1.0


class Http2Port:
    """Accepts connections on TCP ports and Unix sockets."""

    def __init__(
        self, servicer: Servicer, others: OtherCalls, health: Health, certificates: Certificates | None = None
    ) -> None:
        """Listens nowhere yet; TCP ports will have no TLS without certificates."""
        self._event_loop = EventLoop("http2-loop")
        Dispatcher(self._event_loop, servicer.batcher)
        servicer.shared_requests.event_loop = servicer.load.event_loop = self._event_loop
        self._strangers = strangers = Strangers(servicer, others, certificates, self._add, self._renew)
        self._calls = Http2Calls(servicer, health, self._event_loop, strangers.penalise, strangers.take_back)
        self._connections = self._calls.connections
        self._paths: list[Path] = []

    def listen_on_port(self, host: str, port: int) -> int:
        """Listens on a TCP port of every address of a host, and returns it; 0 chooses a free one.

        Raises:
            ListenError: The port is taken, or may not be used.
        """
        for listener in tcp_listeners(host, port):
            self._strangers.listen(listener)
            bound: int = listener.getsockname()[1]
        return bound

    def listen_on_path(self, path: Path, mode: int) -> None:
        """Listens on a Unix socket with these permissions, which it removes in the end.

        Raises:
            ListenError: The path is taken, or may not be used.
        """
        self._strangers.listen(unix_listener(path, mode))
        self._paths.append(path)

    def listen_on_socket(self, listener: socket.socket) -> None:
        """Listens on a socket that is bound and listening."""
        self._strangers.listen(listener)

    def start(self) -> None:
        """Starts to accept connections."""
        self._event_loop.start()
        self._strangers.start()

    @property
    def is_alive(self) -> bool:
        """Whether its threads run that accept connections and begin calls."""
        return self._event_loop.is_alive and self._strangers.is_alive

    @property
    def connections(self) -> int:
        """The number of connections that have made a call."""
        return len(self._connections)

    def stop(self, drain_timeout_s: float) -> None:
        """Accepts no more connections and calls, and waits for the running calls until the timeout."""
        for path in self._paths:  # before they are closed, as another server may listen there from then on
            path.unlink(missing_ok=True)
        self._strangers.stop()
        if not self._event_loop.is_alive:  # it was not started, or has failed
            if not len(self._connections):
                self._connections.lent.threads.shutdown()
            return
        self._event_loop.call_in_background(self._connections.drain)  # after the connections that came before
        if not self._connections.drained.wait(drain_timeout_s):
            self._event_loop.call_soon(self._connections.abort)
            self._connections.drained.wait(_END_TIMEOUT_S)
        self._event_loop.stop(_END_TIMEOUT_S)
        if self._connections.drained.is_set():
            self._connections.lent.threads.shutdown()

    def _add(self, *first_call: Any) -> None:
        self._event_loop.call_in_background(partial(self._calls.add, *first_call))

    def _renew(self) -> None:
        self._event_loop.call_in_background(self._connections.renew)
