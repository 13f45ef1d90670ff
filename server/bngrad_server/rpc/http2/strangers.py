"""Connections of the HTTP/2 port that have not shown yet who they are: accepted, in a TLS handshake, or before a call.

They have a thread of their own, which may use a share of a core only, so no flood of them delays calls. A connection
leaves it with its first whole header block, if that begins a call and has a valid token where one is needed. Until then
it has no other thread, a few turns to read, a few seconds, and one of few places.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial

from bngrad_server.rpc.http2.handlers import Http2Handler
from bngrad_server.rpc.http2.limits.penalties import Penalties, peer_of
from bngrad_server.rpc.http2.limits.places import Places
from bngrad_server.rpc.http2.refusal import refuse
from bngrad_server.rpc.other_calls import OtherCalls
from bngrad_server.rpc.servicer import Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.security.auth import local_client
from bngrad_server.security.certificates import Certificates, client_of_socket
from bngrad_wire import http2
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.tls import ALPN

logger = logging.getLogger(__name__)

_CPU_SHARE = 0.25
_REMOTE_PLACES = 128
_LOCAL_PLACES = 64
_MAX_TURNS = 64
"""How often a stranger is read from: a client that begins a call at once needs two or three turns."""
_HANDSHAKE_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 5.0
_LAST_WORDS_S = 1.0
"""How long a client has to read its refusal."""
_ACCEPTED_PER_TURN = 4
_END_TIMEOUT_S = 1.0

_LEFT_SCORE, _HANDSHAKE_SCORE, _BREACH_SCORE = 1.0, 2.0, 4.0
"""What a connection counts for in `Penalties` that never became known, failed its handshake, or broke the protocol."""

Welcome = Callable[[socket.socket, http2.ServerConnection, Http2Handler, http2.ServerCall, RpcContext], None]


class _Stranger:
    """A connection, and how far it has come.

    Attributes:
        sock: Its socket.
        fd: The socket's descriptor, also once it is closed.
        client: The client as which it is known before its call, see `RpcContext.client`.
        peer: Whom its breaches are counted for.
        is_local: Whether it came over a Unix socket.
        resumes_at: Until when it is left alone, for breaches of its peer; infinite if it is not.
        until: When it is closed.
        turns: How often it was read from.
        has_ended: Whether it is read no more, until it is closed.
        http: The HTTP/2 connection, after the handshake.
        introduction: Hands it over with its first call, once that is known to be good.
    """

    def __init__(self, sock: socket.socket, client: str) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.client = client
        self.peer = peer_of(client)
        self.is_local = sock.family == socket.AF_UNIX
        self.resumes_at = math.inf
        self.until = math.inf
        self.turns = 0
        self.has_ended = False
        self.http: http2.ServerConnection | None = None
        self.introduction: Callable[[], None] | None = None


class Strangers:
    """Accepts connections, and hands over those that have begun a call."""

    def __init__(
        self,
        servicer: Servicer,
        others: OtherCalls,
        certificates: Certificates | None,
        welcome: Welcome,
        on_new_authorities: Callable[[], None],
    ) -> None:
        """Accepts nothing yet; calls back on its thread: ``welcome`` with a connection and its first call."""
        self._servicer = servicer
        self._others = others
        self._metrics = servicer.observer.metrics
        self._certificates = certificates
        self._client_ca = None if certificates is None else certificates.client_ca
        self._welcome = welcome
        self._on_new_authorities = on_new_authorities
        self._penalties = Penalties()
        self._all: dict[_Stranger, None] = {}  # oldest first
        self._remote: Places[_Stranger] = Places(_REMOTE_PLACES)
        self._local: Places[_Stranger] = Places(_LOCAL_PLACES)
        self._listeners: list[socket.socket] = []
        self._waiting_listeners: list[socket.socket] = []
        self._event_loop = EventLoop("http2-accept", _CPU_SHARE)
        self._event_loop.on_tick = self._on_tick

    def listen(self, listener: socket.socket) -> None:
        """Accepts connections of a listening socket, which it closes in the end; to be called before `start`."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._waiting_listeners.append(listener)

    def start(self) -> None:
        """Starts the thread."""
        self._accept_again()
        self._event_loop.start()

    def stop(self) -> None:
        """Closes listeners and strangers, and ends the thread."""
        if self._event_loop.is_alive:
            self._event_loop.call_soon(self._close_all)
            self._event_loop.stop(_END_TIMEOUT_S)
        else:
            self._close_all()

    def penalise(self, client: str, score: float) -> None:
        """Delays the next connections of a client that broke the protocol; for any thread."""
        self._event_loop.call_soon(partial(self._penalties.add, peer_of(client), score))

    def take_back(self, sock: socket.socket, http: http2.ServerConnection, client: str) -> None:
        """Makes a connection a stranger again, whose token is no longer valid; for any thread."""
        self._event_loop.call_soon(partial(self._take_back, sock, http, client))

    def _accept_again(self) -> None:
        for listener in self._waiting_listeners:
            self._event_loop.add_reader(listener.fileno(), partial(self._accept, listener))
        self._waiting_listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # mostly, there are no file descriptors left
                logger.warning("cannot accept a connection: %s", error)
                self._event_loop.remove_reader(listener.fileno())
                self._waiting_listeners.append(listener)  # until the next tick
                return
            client = local_client(sock) if sock.family == socket.AF_UNIX else str(address[0])
            self._add(_Stranger(sock, client))

    def _add(self, stranger: _Stranger) -> None:
        places = self._local if stranger.is_local else self._remote
        if places.is_full and (dispensable := places.most_dispensable(self._all)) is not None:
            self._end(dispensable, "full")
        places.take(stranger, stranger.peer)
        self._all[stranger] = None
        if stranger.http is not None:
            self._read_from(stranger)
        elif delay_s := self._penalties.delay_s(stranger.peer):
            stranger.resumes_at = time.monotonic() + delay_s
        else:
            self._begin(stranger)

    def _take_back(self, sock: socket.socket, http: http2.ServerConnection, client: str) -> None:
        stranger = _Stranger(sock, client)
        stranger.http = http
        self._add(stranger)

    def _begin(self, stranger: _Stranger) -> None:
        if self._certificates is None or stranger.is_local:
            self._greet(stranger)
            return
        try:
            stranger.sock.setblocking(False)
            context = self._certificates.context
            stranger.sock = context.wrap_socket(stranger.sock, server_side=True, do_handshake_on_connect=False)
        except OSError as error:  # the client is gone already
            self._fail(stranger, error)
            return
        stranger.until = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        self._event_loop.add_reader(stranger.fd, partial(self._shake_hands, stranger))

    def _shake_hands(self, stranger: _Stranger) -> None:
        sock = stranger.sock
        assert isinstance(sock, ssl.SSLSocket)
        try:
            sock.do_handshake()
            if sock.selected_alpn_protocol() != ALPN:
                raise ValueError(f"ALPN names no protocol of ours: the client must offer {ALPN!r}")
            stranger.client = client_of_socket(sock, stranger.client)
        except ssl.SSLWantReadError:
            return
        except (OSError, ValueError) as error:
            logger.debug("a handshake with %s failed: %s", stranger.client, error)
            self._end(stranger, "handshake", _HANDSHAKE_SCORE)
            return
        self._event_loop.remove_reader(stranger.fd)
        self._greet(stranger)

    def _greet(self, stranger: _Stranger) -> None:
        try:
            http2.set_timeout(stranger.sock, _CALL_TIMEOUT_S)
            stranger.http = http2.ServerConnection(stranger.sock)
        except OSError as error:
            self._fail(stranger, error)
            return
        self._read_from(stranger)

    def _read_from(self, stranger: _Stranger) -> None:
        assert stranger.http is not None
        stranger.http.blocking = False
        stranger.until = time.monotonic() + _CALL_TIMEOUT_S
        self._event_loop.add_reader(stranger.fd, partial(self._read, stranger))
        if stranger.http.has_pending_input:
            self._event_loop.call_soon(partial(self._read, stranger))

    def _read(self, stranger: _Stranger) -> None:
        http = stranger.http
        if http is None or stranger not in self._all or stranger.introduction is not None or stranger.has_ended:
            return
        stranger.turns += 1
        try:
            call = http.accept_nonblocking()
            if call is not None and self._is_good(stranger, http, call):
                return
            http.flush()
        except Exception as error:
            self._fail(stranger, error)
            return
        if http.outbound:  # it does not read
            self._end(stranger, "protocol", _BREACH_SCORE)
        elif stranger.turns >= _MAX_TURNS:  # it has nothing to say
            self._end_later(stranger, http)
        elif http.has_pending_input:
            self._event_loop.call_soon(partial(self._read, stranger))

    def _is_good(self, stranger: _Stranger, http: http2.ServerConnection, call: http2.ServerCall) -> bool:
        """Hands over a connection with its first call if that may be made; refuses it otherwise."""
        if call.failure is not None:  # reset at once
            call.end()
            return False
        handler = Http2Handler(self._servicer, self._others, stranger.sock, http.io, stranger.client)
        try:
            rpc = handler.checked_context(call)
        except Exception as error:
            refuse(call, error)
            return False
        self._event_loop.remove_reader(stranger.fd)
        stranger.introduction = partial(self._welcome, stranger.sock, http, handler, call, rpc)
        client = peer_of(rpc.client)
        delay_s = self._penalties.delay_s(client)
        if delay_s:
            http.distrust()
        if client == stranger.peer:  # it has waited before
            delay_s = 0.0
        if delay_s:
            stranger.resumes_at = time.monotonic() + delay_s
        else:
            self._resume(stranger)
        return True

    def _resume(self, stranger: _Stranger) -> None:
        stranger.resumes_at = math.inf
        if stranger.introduction is None:
            self._begin(stranger)
        else:
            self._forget(stranger)
            stranger.introduction()

    def _on_tick(self) -> None:
        """Resumes and closes strangers whose time has come, and checks whether the authorities have changed."""
        self._accept_again()
        now = time.monotonic()
        for stranger in list(self._all):
            if stranger.resumes_at <= now:
                self._resume(stranger)
            elif stranger.until <= now and stranger.has_ended:
                self._close(stranger)
            elif stranger.until <= now and stranger.resumes_at == math.inf and not _is_unread(stranger):
                self._end(stranger, "handshake" if stranger.http is None else "silent")
        client_ca = None if self._certificates is None else self._certificates.client_ca
        if client_ca != self._client_ca:
            self._client_ca = client_ca
            for stranger in [each for each in self._all if not each.is_local]:
                self._close(stranger)
            self._on_new_authorities()

    def _fail(self, stranger: _Stranger, error: Exception) -> None:
        if isinstance(error, http2.ProtocolError):
            logger.debug("a connection of %s ended: %s", stranger.client, error)
            self._end(stranger, "protocol", _BREACH_SCORE)
        elif isinstance(error, OSError):  # it is gone
            self._end(stranger, None, 0.0 if stranger.is_local else _LEFT_SCORE)
        else:
            logger.error("a connection failed", exc_info=error)
            self._end(stranger, None)

    def _end(self, stranger: _Stranger, reason: str | None, score: float = _LEFT_SCORE) -> None:
        """Closes a connection for one of the reasons that are counted, and remembers its peer."""
        if reason is not None:
            self._metrics.refused_connection(reason)
        self._penalties.add(stranger.peer, score)
        self._close(stranger)

    def _end_later(self, stranger: _Stranger, http: http2.ServerConnection) -> None:
        """Reads no more of a connection; to close it now would take a refusal from its client that is still unread."""
        self._metrics.refused_connection("protocol")
        self._penalties.add(stranger.peer, _BREACH_SCORE)
        self._event_loop.remove_reader(stranger.fd)
        stranger.has_ended = True
        stranger.until = time.monotonic() + _LAST_WORDS_S
        try:
            http.send_control(frames.goaway(http.last_stream_id, ErrorCode.NO_ERROR))
            http.flush()
        except OSError:
            self._close(stranger)

    def _close(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        self._event_loop.remove_reader(stranger.fd)
        if stranger.http is None:
            stranger.sock.close()
        else:
            stranger.http.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._all.pop(stranger, None)
        self._local.leave(stranger)
        self._remote.leave(stranger)

    def _close_all(self) -> None:
        for listener in self._listeners:
            self._event_loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        self._waiting_listeners.clear()
        for stranger in list(self._all):
            self._close(stranger)


def _is_unread(stranger: _Stranger) -> bool:
    """Whether a stranger has said something that this thread, which may be late itself, has not read yet."""
    if stranger.http is None:
        return False
    poll = select.poll()
    poll.register(stranger.sock, select.POLLIN)
    return stranger.http.has_pending_input or bool(poll.poll(0))
