"""TLS handshakes of the HTTP/2 port, on an event loop of their own, so that they do not delay calls.

A client that stops amid its handshake occupies a descriptor and no thread; if there are too many, the oldest is closed.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial

from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.security.certificates import Certificates, client_of_socket

logger = logging.getLogger(__name__)

_MAX_HANDSHAKES = 256
_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 1.0

Taker = Callable[[socket.socket, str], None]


class Handshakes:
    """The event loop for handshakes. `start`, `stop` and `begin` are for any thread."""

    def __init__(
        self,
        certificates: Certificates,
        done: Taker,
        on_new_authorities: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        """Calls back on its event loop: ``done`` with each connection whose handshake is done, and its client."""
        self._certificates = certificates
        self._done = done
        self._on_new_authorities = on_new_authorities
        self._on_failure = on_failure
        self._client_ca = certificates.client_ca
        self._event_loop = EventLoop("handshakes")
        self._event_loop.on_tick = self._on_tick
        self._running: dict[ssl.SSLSocket, tuple[str, float]] = {}  # oldest first

    def start(self) -> None:
        """Starts the thread."""
        self._event_loop.start()

    def stop(self) -> None:
        """Ends the thread and the handshakes under way."""
        if self._event_loop.is_alive:
            self._event_loop.call_soon(self._close_all)
            self._event_loop.stop(_END_TIMEOUT_S)

    def begin(self, sock: socket.socket, client: str) -> None:
        """Begins a handshake on an accepted socket."""
        self._event_loop.call_soon(partial(self._begin, sock, client))

    def _begin(self, plain: socket.socket, client: str) -> None:
        if len(self._running) >= _MAX_HANDSHAKES:
            self._fail(next(iter(self._running)))
        try:
            plain.setblocking(False)
            sock = self._certificates.context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except OSError:  # the client is gone already
            plain.close()
            return
        self._running[sock] = client, time.monotonic() + _TIMEOUT_S
        self._event_loop.add_reader(sock.fileno(), partial(self._continue, sock))

    def _continue(self, sock: ssl.SSLSocket) -> None:
        if sock not in self._running:
            return
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            return
        except (OSError, ValueError) as error:
            logger.debug("a handshake with %s failed: %s", self._running[sock][0], error)
            self._fail(sock)
            return
        client, _ = self._running.pop(sock)
        self._event_loop.remove_reader(sock.fileno())
        self._done(sock, client_of_socket(sock, client))

    def _on_tick(self) -> None:
        """Closes handshakes that take too long, and checks whether the authorities have changed."""
        now = time.monotonic()
        for sock, (_, until) in list(self._running.items()):
            if until > now:
                break
            self._fail(sock)
        client_ca = self._certificates.client_ca
        if client_ca != self._client_ca:
            self._client_ca = client_ca
            self._on_new_authorities()

    def _fail(self, sock: ssl.SSLSocket) -> None:
        self._on_failure()
        self._close(sock)

    def _close(self, sock: ssl.SSLSocket) -> None:
        del self._running[sock]
        self._event_loop.remove_reader(sock.fileno())
        sock.close()

    def _close_all(self) -> None:
        for sock in list(self._running):
            self._close(sock)
