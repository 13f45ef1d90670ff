"""A connection before its first call, and how far it has come."""

from __future__ import annotations

import math
import select
import socket
import ssl
from collections.abc import Callable

from bngrad_server.rpc.http2.limits.penalties import peer_of
from bngrad_server.security.certificates import client_of_socket
from bngrad_wire import http2
from bngrad_wire.http2.sockets.tls import ALPN


class Stranger:
    """A connection that has not shown yet who it is.

    Attributes:
        sock: Its socket.
        fd: The socket's descriptor, also once it is closed.
        client: The client as which it is known before its call, see `RpcContext.client`.
        peer: Whom its breaches are counted for.
        is_local: Whether it came over a Unix socket.
        resumes_at: Until when it is left alone, for breaches of its peer; infinite if it is not.
        until: When it is closed.
        turns: How often it was read from, in its handshake or afterwards.
        is_new: Whether it is read from before those that have said much already.
        has_ended: Whether it is read no more, until it is closed.
        http: The HTTP/2 connection, after the handshake.
        introduction: Hands it over with its first call, once that is known to be good.
    """

    def __init__(self, sock: socket.socket, client: str, http: http2.MultiplexedConnection | None = None) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.client = client
        self.peer = peer_of(client)
        self.is_local = sock.family == socket.AF_UNIX
        self.resumes_at = math.inf
        self.until = math.inf
        self.turns = 0
        self.is_new = True
        self.has_ended = False
        self.http = http
        self.introduction: Callable[[], None] | None = None

    def begin_handshake(self, context: ssl.SSLContext) -> None:
        """Prepares the socket for the steps of `shake_hands`.

        Raises:
            OSError: The client is gone.
        """
        self.sock.setblocking(False)
        self.sock = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)

    def shake_hands(self) -> bool:
        """Does as much of the TLS handshake as the client has begun, and returns whether that was all.

        Raises:
            OSError: The handshake failed.
            ValueError: The client does not offer HTTP/2.
        """
        assert isinstance(self.sock, ssl.SSLSocket)
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            return False
        if self.sock.selected_alpn_protocol() != ALPN:
            raise ValueError(f"ALPN names no protocol of ours: the client must offer {ALPN!r}")
        self.client = client_of_socket(self.sock, self.client)
        return True

    @property
    def is_unread(self) -> bool:
        """Whether it has said something that the event loop, which may be late itself, has not read yet."""
        if self.http is None:
            return False
        return self.http.has_pending_input or self._has_event(select.POLLIN)

    @property
    def has_left(self) -> bool:
        """Whether it has closed the connection; some of what it said may be unread."""
        return self._has_event(select.POLLRDHUP)

    def _has_event(self, event: int) -> bool:
        poll = select.poll()
        poll.register(self.sock, event)
        return bool(poll.poll(0))
