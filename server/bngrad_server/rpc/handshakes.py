"""TLS handshakes of the server's own endpoint, apart from the thread that serves calls.

A client that stands still amid its handshake takes a descriptor and no thread; of too many the oldest is closed.
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
    """The thread for them. But for `begin` and what starts and stops it, all is done by that."""

    def __init__(
        self,
        certificates: Certificates,
        done: Taker,
        on_new_authorities: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        """Begins nothing yet.

        Args:
            certificates: What to show and what to ask for.
            done: Takes connections whose handshake is done, and whom they belong to; called by this thread.
            on_new_authorities: Called when other clients than before are accepted.
            on_failure: Called for each handshake that comes to nothing.
        """
        self._certificates = certificates
        self._done = done
        self._on_new_authorities = on_new_authorities
        self._on_failure = on_failure
        self._client_ca = certificates.client_ca
        self._event_loop = EventLoop("handshakes")
        self._event_loop.on_tick = self._look
        self._running: dict[ssl.SSLSocket, tuple[str, float]] = {}  # the oldest first

    def start(self) -> None:
        """Starts the thread."""
        self._event_loop.start()

    def stop(self) -> None:
        """Ends it, and what has not become a connection."""
        if self._event_loop.is_alive:
            self._event_loop.call_soon(self._close_all)
            self._event_loop.stop(_END_TIMEOUT_S)

    def begin(self, sock: socket.socket, client: str) -> None:
        """Begins a handshake on an accepted socket, from any thread."""
        self._event_loop.call_soon(partial(self._begin, sock, client))

    def _begin(self, plain: socket.socket, client: str) -> None:
        if len(self._running) >= _MAX_HANDSHAKES:
            self._give_up(next(iter(self._running)))
        try:
            plain.setblocking(False)
            sock = self._certificates.context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except OSError:  # it has gone already
            plain.close()
            return
        self._running[sock] = client, time.monotonic() + _TIMEOUT_S
        self._event_loop.add_reader(sock.fileno(), partial(self._go_on, sock))

    def _go_on(self, sock: ssl.SSLSocket) -> None:
        if sock not in self._running:
            return
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            return
        except (OSError, ValueError) as error:
            logger.debug("a handshake with %s failed: %s", self._running[sock][0], error)
            self._give_up(sock)
            return
        client, _ = self._running.pop(sock)
        self._event_loop.remove_reader(sock.fileno())
        self._done(sock, client_of_socket(sock, client))

    def _look(self) -> None:
        """Ends what takes too long, and looks whether the authorities have changed."""
        now = time.monotonic()
        for sock, (_, until) in list(self._running.items()):
            if until > now:
                break
            self._give_up(sock)
        client_ca = self._certificates.client_ca
        if client_ca != self._client_ca:
            self._client_ca = client_ca
            self._on_new_authorities()

    def _give_up(self, sock: ssl.SSLSocket) -> None:
        self._on_failure()
        self._close(sock)

    def _close(self, sock: ssl.SSLSocket) -> None:
        del self._running[sock]
        self._event_loop.remove_reader(sock.fileno())
        sock.close()

    def _close_all(self) -> None:
        for sock in list(self._running):
            self._close(sock)
