"""The connections of the HTTP/2 port, on its event loop.

A small unary call is served inline: the event loop reads it, submits it, and sends the response once a worker has
computed it. Whatever may wait is handled by a thread, to which the event loop lends the connection meanwhile. Threads
that receive a call's message are shared evenly among clients: beyond its share, a call waits without one.

A connection that only costs time, with frames or calls that lead to nothing, is paused.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from bngrad_server.errors import UnauthenticatedError
from bngrad_server.rpc.futile_calls import FutileCalls, is_before
from bngrad_server.rpc.http2.connection import Connection, InlineCall
from bngrad_server.rpc.http2.handlers import Http2Handler, abort
from bngrad_server.rpc.http2.inline_calls import InlineCalls
from bngrad_server.rpc.http2.limits.penalties import Penalties, peer_of
from bngrad_server.rpc.http2.limits.places import Places
from bngrad_server.rpc.http2.limits.waste import Paused
from bngrad_server.rpc.http2.receiving import ReceivingCalls
from bngrad_server.rpc.servicer import UNARY_OPS, Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.runtime.executors import OnDemandExecutor
from bngrad_wire import http2

logger = logging.getLogger(__name__)

_PLACES = 512
"""For connections over TCP, and as many for Unix sockets. For one more, the client that has most of them loses the one
that was idle longest, or else, if the new one's client has fewer, the one whose message has been awaited longest. If
there is none, the new one is closed; its client falls back to grpcio."""
_FRAME_TIMEOUT_S = 5.0
"""How long a frame or header block may take to arrive while no call runs."""
_BREACH_SCORE = 16.0
"""What a breach of the protocol counts for in `bngrad_server.rpc.http2.limits.penalties`."""
_FUTILE_SCORE = 2.0
"""What a call with a malformed message, or one more that was cancelled, counts for, there and for the next calls."""
_STALL_TIMEOUT_S = 60.0
"""How long a client may pause in the middle of a frame or a call."""
_DELIVERY_TIMEOUT_S = 5.0
"""How long nothing of the last answer may reach the client of a connection that is to be closed."""
_WAIT_S = 0.5
"""After this a thread that waits for a client notices that its transfer is to end."""


class Http2Connections:
    """All connections of the port with a good call. Its methods, except `__len__`, are for the event loop's thread.

    Attributes:
        drained: Is set once `drain` was called and no connection is left.
        threads: The threads of calls that may wait.
    """

    def __init__(
        self,
        servicer: Servicer,
        event_loop: EventLoop,
        on_breach: Callable[[str, float], object],
        on_stranger: Callable[[socket.socket, http2.ServerConnection, str], object],
    ) -> None:
        """Has no connections yet.

        Args:
            servicer: Answers the calls.
            event_loop: Reads from the connections.
            on_breach: Called with the client of a connection that broke the protocol, and what that counts for.
            on_stranger: Takes over a connection whose token is no longer valid.
        """
        self.drained = threading.Event()
        self.threads = OnDemandExecutor("http2-call")
        self._servicer = servicer
        self._metrics = servicer.observer.metrics
        self._event_loop = event_loop
        self._on_breach = on_breach
        self._on_stranger = on_stranger
        self._all: set[Connection] = set()
        self._lent: set[Connection] = set()
        self._remote: Places[Connection] = Places(_PLACES)
        self._local: Places[Connection] = Places(_PLACES)
        self._paused: Paused[Connection] = Paused()
        self._futile = FutileCalls()
        self._penalties = Penalties()
        self._amid_frame: dict[Connection, float] = {}  # and since when
        self._idle: dict[Connection, None] = {}  # the one that was idle longest comes first
        self._closing: dict[Connection, tuple[int, float]] = {}  # what is undelivered, and since when it is as much
        self._inline_calls = InlineCalls(servicer, self._finish_soon)
        self._receiving = ReceivingCalls(is_worthwhile=servicer.admission.is_worthwhile, max_wait_s=servicer.max_wait_s)
        servicer.admission.on_leave.append(self._after_request)
        self._draining = False
        event_loop.on_tick = self._on_tick

    def __len__(self) -> int:
        return len(self._all)

    def add(
        self,
        sock: socket.socket,
        http: http2.ServerConnection,
        handler: Http2Handler,
        call: http2.ServerCall,
        rpc: RpcContext,
    ) -> None:
        """Adds a connection with its first call, whose token and path are good; closes it if there is no room."""
        connection = Connection(sock, http, handler, rpc.client)
        places = self._places(connection)
        if self._draining or not self._make_room(places, rpc.client):
            http.close()
            return
        self._all.add(connection)
        places.take(connection, rpc.client)
        self._idle[connection] = None
        self._watch(connection)
        try:
            http2.set_timeout(sock, _WAIT_S)
            http.io.waits = round(_STALL_TIMEOUT_S / _WAIT_S)
            self._on_call(connection, call, time.perf_counter(), rpc)
        except Exception as error:
            self._fail(connection, error)

    def drain(self) -> None:
        """Accepts no more calls; closes each connection after the call that it has."""
        self._draining = True
        for connection in list(self._idle):
            self._close_once_delivered(connection)
        if not self._all:
            self.drained.set()

    def renew(self) -> None:
        """Closes TLS connections after the calls that they have, so that clients show their certificates again."""
        for connection in list(self._all):
            connection.is_outdated |= isinstance(connection.sock, http2.TlsSocket)
            if connection.is_outdated and connection in self._idle:
                self._close_once_delivered(connection)

    def abort(self) -> None:
        """Ends every connection at once."""
        for connection in list(self._all):
            self._end(connection)

    def _places(self, connection: Connection) -> Places[Connection]:
        return self._local if connection.sock.family == socket.AF_UNIX else self._remote

    def _make_room(self, places: Places[Connection], client: str) -> bool:
        """Returns whether there is a free place for a client, after closing a connection if there was none."""
        if places.is_full:
            self._metrics.refused_connection("full")
            dispensable = places.to_give_up(client, self._idle, self._receiving.awaiting_messages())
            if dispensable is not None:
                places.leave(dispensable)
                self._end(dispensable)
        return not places.is_full

    def _end(self, connection: Connection) -> None:
        """Closes a connection; one that is lent, once its thread has seen it broken."""
        if connection in self._lent:
            connection.is_outdated = True
            abort(connection.sock)
        else:
            self._close(connection)

    def _await_call(self, connection: Connection) -> None:
        """Waits for the next call of a connection, after malformed messages without reading it for a while."""
        if connection.handler.saw_malformed:
            connection.handler.saw_malformed = False
            self._penalise(connection)
        if connection.http.outbound:  # more than the socket took at once
            self._lend(connection, partial(connection.handler.flush, connection.http))
        elif self._draining or connection.is_outdated:
            self._close_once_delivered(connection)
        else:
            self._idle[connection] = None
            self._watch(connection)
            if connection.http.has_pending_input:
                self._event_loop.call_soon(partial(self._on_readable, connection))

    def _penalise(self, connection: Connection) -> None:
        client = peer_of(connection.client)
        self._on_breach(client, _FUTILE_SCORE)
        self._penalties.add(client, _FUTILE_SCORE)
        if delay_s := self._penalties.delay_s(client):
            self._unwatch(connection)
            self._paused.suspend(connection, delay_s)

    def _watch(self, connection: Connection) -> None:
        """Reads from a connection, unless it is paused."""
        if not (connection.is_watched or connection in self._paused):
            connection.is_watched = True
            self._event_loop.add_reader(connection.fd, partial(self._on_readable, connection))

    def _unwatch(self, connection: Connection) -> None:
        if connection.is_watched:
            connection.is_watched = False
            self._event_loop.remove_reader(connection.fd)

    def _on_readable(self, connection: Connection) -> None:
        if not connection.is_watched:  # it was lent, paused or closed meanwhile
            return
        began = time.perf_counter()
        try:
            call = connection.http.accept_nonblocking()
            if connection.inline_call is not None:
                self._on_readable_amid_call(connection, connection.inline_call)
            elif call is not None:
                self._on_call(connection, call, began)
                return
            else:
                self._after_idle_frames(connection)
        except Exception as error:
            self._fail(connection, error)
        self._count_waste(connection, began)

    def _on_call(
        self, connection: Connection, call: http2.ServerCall, began: float, rpc: RpcContext | None = None
    ) -> None:
        """Begins a call; counts the time since ``began`` as wasted if it was refused."""
        del self._idle[connection]
        self._amid_frame.pop(connection, None)
        if self._begin(connection, call, rpc) or connection not in self._idle:
            connection.waste.reset(began)
        else:
            self._count_waste(connection, began)

    def _on_readable_amid_call(self, connection: Connection, inline: InlineCall) -> None:
        if inline.call.failure is not None:
            self._inline_calls.abandon(connection, inline)
            inline.call.end()
            self._count_cancelled(connection, inline.rpc)
            self._await_call(connection)
        else:
            self._after_idle_frames(connection)

    def _count_cancelled(self, connection: Connection, rpc: RpcContext) -> None:
        if is_before(rpc.deadline):
            self._futile.cancelled(connection.client)
            if self._futile.are_too_many(connection.client):
                self._penalise(connection)

    def _after_idle_frames(self, connection: Connection) -> None:
        http = connection.http
        http.flush()
        if http.has_pending_input:
            self._event_loop.call_soon(partial(self._on_readable, connection))
        if connection.inline_call is not None:
            return
        if http.is_amid_frame:
            self._amid_frame.setdefault(connection, time.monotonic())
        else:
            self._amid_frame.pop(connection, None)
        if http.outbound:
            self._lend(connection, partial(connection.handler.flush, http))

    def _count_waste(self, connection: Connection, began: float) -> None:
        """Counts the time since ``began``, in which a connection did nothing useful; pauses it if that is too much."""
        if connection.waste.count(began) and connection in self._all:
            self._unwatch(connection)
            self._paused.add(connection)

    def _on_tick(self) -> None:
        for connection, inline, error in self._inline_calls.expired():
            self._refuse(connection, inline.call, error)
        for connection, waiting, error in self._receiving.expired():
            self._end_receiving(connection)
            self._refuse(connection, waiting.call, error)
        self._receive_waiting()  # a request may have left in the moment in which a call began to wait
        for connection in self._paused.resume():
            if connection in self._idle or connection.inline_call is not None:
                self._watch(connection)
                self._event_loop.call_soon(partial(self._on_readable, connection))
        self._check_frames()
        for connection in list(self._closing):
            self._close_once_delivered(connection)

    def _check_frames(self) -> None:
        """Closes connections whose frames do not end."""
        now = time.monotonic()
        for connection, since in list(self._amid_frame.items()):
            if connection.http.awaits_rest:
                self._on_readable(connection)
            elif connection not in self._idle:  # it has a thread, which has limits of its own
                del self._amid_frame[connection]
            elif now - since > _FRAME_TIMEOUT_S:
                self._metrics.refused_connection("silent")
                self._on_breach(connection.client, _BREACH_SCORE)
                self._close(connection)

    def _begin(self, connection: Connection, call: http2.ServerCall, rpc: RpcContext | None) -> bool:
        """Begins a call: inline if its message has arrived and memory is free, else in a thread.

        Returns whether it has been answered already.
        """
        if call.failure is not None:  # reset at once
            call.end()
            self._await_call(connection)
            return False
        handler = connection.handler
        try:
            if rpc is None:
                rpc = handler.checked_context(call)
            if handler.answer_at_once(call, rpc):
                self._await_call(connection)
                return True
            if call.path not in UNARY_OPS or not call.is_fully_received:
                self._receive(connection, call, rpc)
                return False
            message = handler.receive_request(call, rpc)
            has_memory = self._inline_calls.begin(connection, call, message, rpc)
        except Exception as error:
            self._refuse(connection, call, error)
            return False
        if not has_memory:
            self._lend(connection, partial(handler.handle_unary, call, message, rpc))
        return False

    def _finish_soon(self, connection: Connection, inline: InlineCall) -> None:
        self._event_loop.call_soon(partial(self._finish, connection, inline))

    def _finish(self, connection: Connection, inline: InlineCall) -> None:
        """Answers an inline call whose request has ended."""
        staged = inline.staged
        if inline.is_abandoned:
            staged.close()
            return
        self._inline_calls.forget(connection)
        try:
            was_sent = inline.send_response(connection.handler)
        except Exception as error:
            staged.close(error)
            self._refuse(connection, inline.call, error)
            return
        if was_sent:
            self._futile.answered(connection.client)
            staged.close()
            self._await_call(connection)
        else:
            self._lend(connection, partial(connection.handler.send_response, inline.call, staged))

    def _refuse(self, connection: Connection, call: http2.ServerCall, error: Exception) -> None:
        try:
            connection.handler.refuse(call, error)
            if isinstance(error, UnauthenticatedError):
                self._forget(connection)
                self._on_stranger(connection.sock, connection.http, connection.client)
            else:
                self._await_call(connection)
        except Exception as broken:
            self._fail(connection, broken)

    def _receive(self, connection: Connection, call: http2.ServerCall, rpc: RpcContext) -> None:
        """Receives the message of a call in a thread, as soon as its client may have one more."""
        if self._receiving.add(connection, call, rpc):
            self._lend(connection, partial(connection.handler.handle, call, rpc))
        else:
            self._unwatch(connection)  # what the client sends waits in the kernel

    def _after_request(self) -> None:
        """Is called by any thread after a request has left, where clients have limits."""
        if self._receiving.is_waited_for:
            self._event_loop.call_soon(self._receive_waiting)

    def _receive_waiting(self) -> None:
        for connection, waiting in self._receiving.served():
            self._lend(connection, partial(connection.handler.handle, waiting.call, waiting.rpc))

    def _end_receiving(self, connection: Connection) -> None:
        if self._receiving.discard(connection):
            self._event_loop.call_soon(self._receive_waiting)

    def _lend(self, connection: Connection, action: Callable[[], None]) -> None:
        """Lends a connection to a thread, for an action that may wait."""
        self._idle.pop(connection, None)
        self._unwatch(connection)
        connection.http.blocking = True
        self._lent.add(connection)
        self.threads.submit(partial(self._run_in_thread, connection, action))

    def _run_in_thread(self, connection: Connection, action: Callable[[], None]) -> None:
        is_usable = False
        try:
            action()
            is_usable = True
        except Exception as error:
            self._log_failure(connection, error)
        finally:
            self._event_loop.call_soon(partial(self._return_from_thread, connection, is_usable=is_usable))

    def _return_from_thread(self, connection: Connection, *, is_usable: bool) -> None:
        self._lent.discard(connection)
        self._end_receiving(connection)
        if is_usable:
            connection.http.blocking = False
            connection.waste.begin_reading()
            self._await_call(connection)
        else:
            self._close(connection)

    def _fail(self, connection: Connection, error: Exception) -> None:
        self._log_failure(connection, error)
        self._close(connection)

    def _log_failure(self, connection: Connection, error: Exception) -> None:
        """Logs why a connection ends, and counts a client's breach of the protocol."""
        if isinstance(error, http2.ProtocolError):
            self._metrics.refused_connection("protocol")
            self._on_breach(connection.client, _BREACH_SCORE)
        if isinstance(error, (ConnectionError, TimeoutError)):
            logger.debug("a connection ended: %s", error)
        else:
            logger.error("a connection failed", exc_info=error)

    def _close_once_delivered(self, connection: Connection) -> None:
        """Closes a connection without a call once its client has the last answer; until then nothing is read from it.

        What a client sends to a closed connection resets it, and what the client had not received yet would be lost.
        """
        nbytes, now = connection.undelivered_nbytes, time.monotonic()
        before, since = self._closing.get(connection, (nbytes, now))
        if not nbytes or now - since > _DELIVERY_TIMEOUT_S:
            self._close(connection)
            return
        self._closing[connection] = nbytes, since if nbytes == before else now
        self._unwatch(connection)
        self._idle.pop(connection, None)
        self._amid_frame.pop(connection, None)

    def _close(self, connection: Connection) -> None:
        if connection.inline_call is not None:
            self._inline_calls.abandon(connection, connection.inline_call)
        self._forget(connection)
        connection.http.close()

    def _forget(self, connection: Connection) -> None:
        connection.handler.close()
        self._unwatch(connection)
        self._lent.discard(connection)
        self._end_receiving(connection)
        self._idle.pop(connection, None)
        self._paused.discard(connection)
        self._amid_frame.pop(connection, None)
        self._closing.pop(connection, None)
        self._places(connection).leave(connection)
        self._all.discard(connection)
        if self._draining and not self._all:
            self.drained.set()
