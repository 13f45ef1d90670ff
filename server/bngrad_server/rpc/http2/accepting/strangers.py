"""Connections of the HTTP/2 port that have not shown yet who they are: accepted, in a TLS handshake, or before a call.

They have a thread of their own, which may use a share of a core only, so no flood of them delays calls. A connection
leaves it with its first whole header block, if that begins a call and has a valid token where one is needed. Until then
it has no other thread, a few turns to read, a few seconds, and one of few places.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable
from functools import partial

from bngrad_server.rpc.http2.accepting.acceptor import Acceptor
from bngrad_server.rpc.http2.accepting.stranger import Stranger
from bngrad_server.rpc.http2.handlers import Http2Handler, refuse
from bngrad_server.rpc.http2.limits.penalties import Penalties, peer_of
from bngrad_server.rpc.http2.limits.places import Places
from bngrad_server.rpc.other_calls import OtherCalls
from bngrad_server.rpc.servicer import Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.runtime.listening import max_connections
from bngrad_server.runtime.pauses import Pauses
from bngrad_server.security.certificates import Certificates
from bngrad_wire import http2

logger = logging.getLogger(__name__)

_CPU_SHARE = 0.25
_REMOTE_PLACES = 1024
"""Enough that a client at the address of a flood can end its handshake before it is the oldest one."""
_LOCAL_PLACES = 64
_MAX_TURNS = 64
"""How often a stranger is read from: a client that begins a call at once needs two or three turns."""
_FIRST_TURNS = 4
"""After these, others come first, and what a client has left behind is not read."""
_HANDSHAKE_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 5.0
_LAST_WORDS_S = 1.0
"""How long a client has to read its refusal."""
_END_TIMEOUT_S = 1.0

_LEFT_SCORE, _HANDSHAKE_SCORE, _BREACH_SCORE = 1.0, 2.0, 4.0
"""What counts in `Penalties`: a connection that left without a call, failed its handshake, or broke the protocol."""

Welcome = Callable[[socket.socket, http2.MultiplexedConnection, Http2Handler, http2.ServerCall, RpcContext], None]


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
        self._all: dict[Stranger, None] = {}  # oldest first
        self._remote: Places[Stranger] = Places(min(_REMOTE_PLACES, max_connections()))
        self._local: Places[Stranger] = Places(_LOCAL_PLACES)
        self._event_loop = EventLoop("http2-accept", _CPU_SHARE)
        self._event_loop.on_tick = self._on_tick
        self._acceptor = Acceptor(self._event_loop, self._on_accept)
        self._pauses = Pauses()
        self._has_stopped = False

    def listen(self, listener: socket.socket) -> None:
        """Accepts connections of a listening socket, which it closes in the end; to be called before `start`."""
        self._acceptor.listen(listener)

    def start(self) -> None:
        """Starts the thread."""
        self._acceptor.resume()
        self._event_loop.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._event_loop.is_alive

    def stop(self) -> None:
        """Closes listeners and strangers, and ends the thread."""
        if self._event_loop.is_alive:
            self._event_loop.call_soon(self._close_all)
            self._event_loop.stop(_END_TIMEOUT_S)
        else:
            self._close_all()

    def penalise(self, client: str, score: float) -> None:
        """Delays the next connections of a client that broke the protocol; for any thread."""
        self._penalties.add(peer_of(client), score)

    def take_back(self, sock: socket.socket, http: http2.MultiplexedConnection, client: str) -> None:
        """Makes a connection a stranger again, whose token is no longer valid; for any thread.

        Closes it after `stop`: nothing would read it any more.
        """
        if self._has_stopped:
            http.close()
        else:
            self._event_loop.call_soon(lambda: self._add(Stranger(sock, client, http)))

    def _on_accept(self, sock: socket.socket, client: str) -> None:
        self._add(Stranger(sock, client))

    def _add(self, stranger: Stranger) -> None:
        places = self._local if stranger.is_local else self._remote
        dispensable = places.most_dispensable(self._all) if places.is_full else None
        if dispensable is not None:
            self._end(dispensable, "full")
        places.take(stranger, stranger.peer)
        self._all[stranger] = None
        # A peer that has all places loses its oldest connection to its newest, perhaps before a wait would have ended.
        is_crowded = dispensable is not None and dispensable.peer == stranger.peer
        delay_s = 0.0 if is_crowded else self._penalties.delay_s(stranger.peer)
        if stranger.http is not None:
            self._greet(stranger)
        elif delay_s:
            stranger.resumes_at = time.monotonic() + delay_s
        else:
            self._begin(stranger)

    def _begin(self, stranger: Stranger) -> None:
        if self._certificates is None or stranger.is_local:
            self._greet(stranger)
            return
        try:
            stranger.begin_handshake(self._certificates.context)
            self._event_loop.add_priority_reader(stranger.fd, partial(self._shake_hands, stranger))
        except Exception as error:  # the client is gone already, or there is no memory
            self._fail(stranger, error)
            return
        stranger.until = time.monotonic() + _HANDSHAKE_TIMEOUT_S

    def _shake_hands(self, stranger: Stranger) -> None:
        stranger.turns += 1
        try:
            if stranger.turns > _FIRST_TURNS:
                self._put_off(stranger, self._shake_hands)
            is_done = stranger.shake_hands()
        except (OSError, ValueError) as error:
            logger.debug("a handshake with %s failed: %s", stranger.client, error)
            self._end(stranger, "handshake", _HANDSHAKE_SCORE)
            return
        if is_done:
            self._unwatch(stranger)
            self._greet(stranger)

    def _greet(self, stranger: Stranger) -> None:
        try:
            if stranger.http is None:
                http2.set_timeout(stranger.sock, _CALL_TIMEOUT_S)
                stranger.http = http2.MultiplexedConnection(stranger.sock)
            stranger.http.blocking = False
            if self._is_outdated(stranger):
                self._dismiss(stranger, stranger.http)
                return
            stranger.turns, stranger.is_new = 0, True
            self._event_loop.add_priority_reader(stranger.fd, partial(self._read, stranger))
        except Exception as error:  # the client is gone already, or there is no memory
            self._fail(stranger, error)
            return
        stranger.until = time.monotonic() + _CALL_TIMEOUT_S
        if stranger.http.has_pending_input:
            self._event_loop.call_soon(partial(self._read, stranger))

    def _read(self, stranger: Stranger) -> None:
        http = stranger.http
        if http is None or stranger not in self._all or stranger.introduction is not None or stranger.has_ended:
            return
        stranger.turns += 1
        try:
            if stranger.turns > _FIRST_TURNS:
                self._put_off(stranger, self._read)
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

    def _put_off(self, stranger: Stranger, read: Callable[[Stranger], None]) -> None:
        """Reads from a stranger after new ones and listeners from now on, and no more if its client has left."""
        if stranger.has_left:
            raise http2.PeerGoneError("the client left a flood behind")
        if stranger.is_new:
            stranger.is_new = False
            self._unwatch(stranger)
            self._event_loop.add_reader(stranger.fd, partial(read, stranger))

    def _unwatch(self, stranger: Stranger) -> None:
        self._event_loop.remove_priority_reader(stranger.fd)
        self._event_loop.remove_reader(stranger.fd)

    def _is_good(self, stranger: Stranger, http: http2.MultiplexedConnection, call: http2.ServerCall) -> bool:
        """Hands over a connection with its first call if that may be made; refuses it otherwise."""
        if call.failure is not None:  # reset at once
            call.end()
            return False
        end = partial(http2.abort, stranger.sock)
        handler = Http2Handler(self._servicer, self._others, end, http.io, stranger.client)
        try:
            rpc = handler.checked_context(call)
        except Exception as error:
            refuse(call, error)
            return False
        self._unwatch(stranger)
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

    def _resume(self, stranger: Stranger) -> None:
        stranger.resumes_at = math.inf
        if stranger.introduction is None:
            self._begin(stranger)
        else:
            self._forget(stranger)
            stranger.introduction()

    def _on_tick(self) -> None:
        """Resumes and closes strangers whose time has come, and looks for new tokens and authorities."""
        self._acceptor.resume()
        self._servicer.authenticator.refresh()
        now, pause_s = time.monotonic(), self._pauses.since_last_look()
        for stranger in list(self._all):
            stranger.until += pause_s
            if stranger.resumes_at <= now:
                self._resume(stranger)
            elif stranger.until <= now and stranger.has_ended:
                self._close(stranger)
            elif stranger.until <= now and stranger.resumes_at == math.inf and not stranger.is_unread:
                self._end(stranger, "handshake" if stranger.http is None else "silent")
        client_ca = None if self._certificates is None else self._certificates.client_ca
        if client_ca != self._client_ca:
            self._client_ca = client_ca
            self._end_outdated()
            self._on_new_authorities()

    def _end_outdated(self) -> None:
        """Ends what former authorities have verified; what is amid its handshake is dismissed after that."""
        for stranger in filter(self._is_outdated, list(self._all)):
            if stranger.introduction is not None:
                self._close(stranger)
            elif stranger.http is not None and not stranger.has_ended:
                self._dismiss(stranger, stranger.http)

    def _is_outdated(self, stranger: Stranger) -> bool:
        return self._certificates is not None and self._certificates.is_outdated(stranger.sock)

    def _fail(self, stranger: Stranger, error: Exception) -> None:
        if isinstance(error, http2.ProtocolError):
            logger.debug("a connection of %s ended: %s", stranger.client, error)
            self._end(stranger, "protocol", _BREACH_SCORE)
        elif isinstance(error, OSError):  # it is gone
            self._end(stranger, None, 0.0 if stranger.is_local else _LEFT_SCORE)
        else:
            logger.error("a connection failed", exc_info=error)
            self._end(stranger, None)

    def _end(self, stranger: Stranger, reason: str | None, score: float = _LEFT_SCORE) -> None:
        """Closes a connection for one of the reasons that are counted, and remembers its peer."""
        self._penalties.add(stranger.peer, score)
        if reason is not None:
            self._metrics.refused_connection(reason)
        self._close(stranger)

    def _end_later(self, stranger: Stranger, http: http2.MultiplexedConnection) -> None:
        """Ends a connection that has had its turns."""
        self._penalties.add(stranger.peer, _BREACH_SCORE)
        self._metrics.refused_connection("protocol")
        self._dismiss(stranger, http)

    def _dismiss(self, stranger: Stranger, http: http2.MultiplexedConnection) -> None:
        """Tells a client to call on another connection, and reads no more of this one.

        To close it now would take a refusal, or this, from its client that is still unread.
        """
        self._unwatch(stranger)
        stranger.has_ended = True
        stranger.until = time.monotonic() + _LAST_WORDS_S
        try:
            http.goaway()
            http.flush()
        except OSError:
            self._close(stranger)

    def _close(self, stranger: Stranger) -> None:
        self._forget(stranger)
        self._unwatch(stranger)
        if stranger.http is None:
            stranger.sock.close()
        else:
            stranger.http.close()

    def _forget(self, stranger: Stranger) -> None:
        self._all.pop(stranger, None)
        self._local.leave(stranger)
        self._remote.leave(stranger)

    def _close_all(self) -> None:
        self._has_stopped = True
        self._acceptor.close()
        for stranger in list(self._all):
            self._close(stranger)
