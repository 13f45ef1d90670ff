"""The connections of the HTTP/2 port, on its event loop.

A small unary call is served inline: the event loop reads it, submits it, and sends the response once a worker has
computed it. Whatever may wait is handled by a thread, to which the event loop lends the connection meanwhile. Threads
that receive a call's message are shared evenly among clients: beyond its share, a call waits without one.

A connection that only costs time, with frames or calls that lead to nothing, is paused: it waits in the kernel, and all
paused ones together get a small share of the event loop's time.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial

from bngrad_server.errors import OverloadedError, UnauthenticatedError
from bngrad_server.rpc.http2_handlers import Http2Handler, abort, refuse
from bngrad_server.rpc.places import Places, ThreadShares
from bngrad_server.rpc.servicer import UNARY_OPS, Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.runtime.executors import OnDemandExecutor
from bngrad_server.staged_request import StagedRequest
from bngrad_wire import http2

logger = logging.getLogger(__name__)

_PLACES = 512
"""For connections over TCP, and as many for Unix sockets. For one more, the client that has most of them loses the one
that was idle longest, or else, if the new one's client has fewer, the one whose message has been awaited longest. If
there is none, the new one is closed; its client falls back to grpcio."""
_RECEIVING_THREADS = 192
"""For calls whose message has not arrived whole, of all clients; a client by itself gets 128."""
_RETRY_S = 1.0
_ALLOWANCE_S = 1e-3
"""How long a connection may keep the event loop busy after its last good call, before it is paused."""
_ALLOWED_SHARE = 1e-4
"""What that grows by, for keepalive and the like."""
_DISCARDABLE_NBYTES = 2**28
"""How much of an upload that was refused is read, and discarded, without counting as wasted time."""
_LEAST_NBYTES = 1024
"""What each read counts for at least."""
_PAUSED_SHARE = 0.1
"""The share of the event loop's time that paused connections get together."""
_FRAME_TIMEOUT_S = 5.0
"""How long a frame or header block may take to arrive while no call runs."""
_BREACH_SCORE = 16.0
"""What a breach of the protocol counts for in `bngrad_server.rpc.penalties`."""
_STALL_TIMEOUT_S = 60.0
"""How long a client may pause in the middle of a frame or a call."""
_WAIT_S = 0.5
"""After this a thread that waits for a client notices that its transfer is to end."""
_MAX_INLINE_RESPONSE_NBYTES = 64 * 1024


class _InlineCall:
    """A unary call without a thread.

    Attributes:
        call: The call.
        rpc: Its context.
        staged: Its staged request, once it has been submitted.
        is_abandoned: Whether the call has ended before its request.
    """

    __slots__ = ("call", "is_abandoned", "rpc", "staged")
    staged: StagedRequest

    def __init__(self, call: http2.ServerCall, rpc: RpcContext) -> None:
        self.call = call
        self.rpc = rpc
        self.is_abandoned = False


@dataclass(frozen=True, slots=True)
class _WaitingCall:
    """A call that waits for a thread to receive its message.

    Attributes:
        call: The call.
        rpc: Its context.
        until: How long it may wait.
    """

    call: http2.ServerCall
    rpc: RpcContext
    until: float


class _Connection:
    """A connection: idle, or with an inline call, or lent to a thread, or with a call that waits for one.

    Attributes:
        sock: Its socket.
        fd: The socket's descriptor.
        client: The client that its first call belonged to.
        http: The HTTP/2 connection.
        handler: Handles its calls in threads.
        inline_call: Its running call, if it has no thread.
        waiting_call: Its call, if that waits for a thread.
        is_watched: Whether the event loop reads from it; then no thread uses it.
        is_outdated: Whether it is to be closed after the call that it has.
        wasted_s: How long it has kept the event loop busy since its last good call.
        last_wasted_s: How long at the last time.
        discardable_nbytes: How much more may be discarded of an upload that was refused.
        moved: How many bytes the loop, or a thread, had received and sent when it last counted.
        frame_budget: The connection's budget of frames at that time.
        useful_at: When it began that call, or was accepted.
    """

    def __init__(self, sock: socket.socket, http: http2.ServerConnection, handler: Http2Handler, client: str) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.http = http
        self.handler = handler
        self.client = client
        self.inline_call: _InlineCall | None = None
        self.waiting_call: _WaitingCall | None = None
        self.is_watched = False
        self.is_outdated = False
        self.wasted_s = self.last_wasted_s = 0.0
        self.discardable_nbytes = 0
        self.moved = http.io.moved
        self.frame_budget = http.frame_budget
        self.useful_at = time.perf_counter()


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
        self._all: set[_Connection] = set()
        self._lent: set[_Connection] = set()
        self._remote: Places[_Connection] = Places(_PLACES)
        self._local: Places[_Connection] = Places(_PLACES)
        self._paused: dict[_Connection, None] = {}  # the one that waits longest comes first
        self._amid_frame: dict[_Connection, float] = {}  # and since when
        self._ticked_at = time.monotonic()
        self._budget_s = 0.0  # of paused connections
        self._idle: dict[_Connection, None] = {}  # the one that was idle longest comes first
        self._with_inline_call: set[_Connection] = set()
        self._receiving: dict[_Connection, None] = {}  # with or without a thread; the oldest comes first
        self._thread_shares: ThreadShares[_Connection] = ThreadShares(_RECEIVING_THREADS)
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
        connection = _Connection(sock, http, handler, rpc.client)
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
            self._close(connection)
        if not self._all:
            self.drained.set()

    def renew(self) -> None:
        """Closes TLS connections after the calls that they have, so that clients show their certificates again."""
        for connection in list(self._all):
            connection.is_outdated |= isinstance(connection.sock, http2.TlsSocket)
            if connection.is_outdated and connection in self._idle:
                self._close(connection)

    def abort(self) -> None:
        """Ends every connection at once."""
        for connection in list(self._all):
            self._end(connection)

    def _places(self, connection: _Connection) -> Places[_Connection]:
        return self._local if connection.sock.family == socket.AF_UNIX else self._remote

    def _make_room(self, places: Places[_Connection], client: str) -> bool:
        """Returns whether there is a free place for a client, after closing a connection if there was none."""
        if places.is_full:
            self._metrics.refused_connection("full")
            busy = (each for each in self._receiving if _awaits_message(each))
            dispensable = places.to_give_up(client, self._idle, busy)
            if dispensable is not None:
                places.leave(dispensable)
                self._end(dispensable)
        return not places.is_full

    def _end(self, connection: _Connection) -> None:
        """Closes a connection; one that is lent, once its thread has seen it broken."""
        if connection in self._lent:
            connection.is_outdated = True
            abort(connection.sock)
        else:
            self._close(connection)

    def _await_call(self, connection: _Connection) -> None:
        """Waits for the next call of a connection."""
        if connection.http.outbound:  # more than the socket took at once
            self._lend(connection, partial(connection.handler.flush, connection.http))
        elif self._draining or connection.is_outdated:
            self._close(connection)
        else:
            self._idle[connection] = None
            self._watch(connection)
            if connection.http.has_pending_input:
                self._event_loop.call_soon(partial(self._on_readable, connection))

    def _watch(self, connection: _Connection) -> None:
        """Reads from a connection, unless it is paused."""
        if not connection.is_watched and connection not in self._paused:
            connection.is_watched = True
            self._event_loop.add_reader(connection.fd, partial(self._on_readable, connection))

    def _unwatch(self, connection: _Connection) -> None:
        if connection.is_watched:
            connection.is_watched = False
            self._event_loop.remove_reader(connection.fd)

    def _on_readable(self, connection: _Connection) -> None:
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
        self, connection: _Connection, call: http2.ServerCall, began: float, rpc: RpcContext | None = None
    ) -> None:
        """Begins a call; counts the time since ``began`` as wasted if it was refused."""
        del self._idle[connection]
        self._amid_frame.pop(connection, None)
        self._begin(connection, call, rpc)
        if connection in self._idle:
            self._count_waste(connection, began)
        else:
            connection.wasted_s, connection.useful_at = 0.0, began
            connection.discardable_nbytes = _DISCARDABLE_NBYTES
            connection.frame_budget = connection.http.frame_budget

    def _on_readable_amid_call(self, connection: _Connection, inline: _InlineCall) -> None:
        if inline.call.failure is not None:
            self._abandon(connection, inline)
            inline.call.end()
            self._await_call(connection)
        else:
            self._after_idle_frames(connection)

    def _after_idle_frames(self, connection: _Connection) -> None:
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

    def _count_waste(self, connection: _Connection, began: float) -> None:
        """Counts the time since ``began``, in which a connection did nothing useful; pauses it if that is too much."""
        http = connection.http
        has_only_discarded = http.frame_budget >= connection.frame_budget and connection.discardable_nbytes > 0
        connection.discardable_nbytes -= max(http.io.moved - connection.moved, _LEAST_NBYTES)
        connection.moved, connection.frame_budget = http.io.moved, http.frame_budget
        if has_only_discarded:
            return
        now = time.perf_counter()
        connection.last_wasted_s = now - began
        connection.wasted_s += connection.last_wasted_s
        allowed_s = _ALLOWANCE_S + _ALLOWED_SHARE * (now - connection.useful_at)
        if connection.wasted_s > allowed_s and connection in self._all:
            self._unwatch(connection)
            self._paused[connection] = None

    def _on_tick(self) -> None:
        self._check_deadlines()
        self._check_waiting()
        now = time.monotonic()
        self._resume_paused((now - self._ticked_at) * _PAUSED_SHARE)
        self._ticked_at = now
        for connection, since in list(self._amid_frame.items()):
            if connection not in self._idle:  # it has a thread, which has limits of its own
                del self._amid_frame[connection]
            elif now - since > _FRAME_TIMEOUT_S:
                self._metrics.refused_connection("silent")
                self._on_breach(connection.client, _BREACH_SCORE)
                self._close(connection)

    def _resume_paused(self, earned_s: float) -> None:
        """Reads from paused connections again, from as many as the time allows that they took when last read from."""
        self._budget_s = min(self._budget_s, 0.0) + earned_s
        while self._paused and self._budget_s > 0:
            connection = next(iter(self._paused))
            del self._paused[connection]
            self._budget_s -= connection.last_wasted_s
            if connection in self._idle or connection.inline_call is not None:
                self._watch(connection)
                self._event_loop.call_soon(partial(self._on_readable, connection))

    def _begin(self, connection: _Connection, call: http2.ServerCall, rpc: RpcContext | None) -> None:
        """Begins a call: inline if its message has arrived and memory is free, else in a thread."""
        if call.failure is not None:  # reset at once
            call.end()
            self._await_call(connection)
            return
        handler = connection.handler
        try:
            if rpc is None:
                rpc = handler.checked_context(call)
            if call.path not in UNARY_OPS or not call.is_fully_received:
                self._receive(connection, call, rpc)
                return
            message = handler.receive_request(call, rpc)
            inline = _InlineCall(call, rpc)
            on_end = partial(self._event_loop.call_soon, partial(self._finish, connection, inline))
            staged = self._servicer.submit(UNARY_OPS[call.path], message.data, rpc, on_end)
        except Exception as error:
            self._refuse(connection, call, error)
            return
        if staged is None:
            self._lend(connection, partial(handler.handle_unary, call, message, rpc))
        else:
            inline.staged = staged
            connection.inline_call = inline
            self._with_inline_call.add(connection)

    def _finish(self, connection: _Connection, inline: _InlineCall) -> None:
        """Answers an inline call whose request has ended."""
        staged = inline.staged
        if inline.is_abandoned:
            staged.close()
            return
        self._forget_call(connection)
        try:
            was_sent = _send_response(inline)
        except Exception as error:
            staged.close(error)
            self._refuse(connection, inline.call, error)
            return
        if was_sent:
            staged.close()
            self._await_call(connection)
        elif not self._lend(connection, partial(connection.handler.send_response, inline.call, staged)):
            staged.close()

    def _refuse(self, connection: _Connection, call: http2.ServerCall, error: Exception) -> None:
        try:
            refuse(call, error)
            if isinstance(error, UnauthenticatedError):
                self._forget(connection)
                self._on_stranger(connection.sock, connection.http, connection.client)
            else:
                self._await_call(connection)
        except Exception as broken:
            self._fail(connection, broken)

    def _check_deadlines(self) -> None:
        """Refuses inline calls whose deadline has passed while a worker computes them."""
        for connection in list(self._with_inline_call):
            inline = connection.inline_call
            assert inline is not None
            assert inline.staged.job is not None
            try:
                self._servicer.batcher.expire(inline.staged.job)
            except (TimeoutError, CancelledError) as error:
                inline.is_abandoned = True
                inline.staged.close(error)
                self._forget_call(connection)
                self._refuse(connection, inline.call, error)

    def _receive(self, connection: _Connection, call: http2.ServerCall, rpc: RpcContext) -> None:
        """Receives the message of a call in a thread, as soon as its client may have one more."""
        self._receiving[connection] = None
        if self._thread_shares.take(connection, connection.client):
            self._lend(connection, partial(connection.handler.handle, call, rpc))
        else:
            self._unwatch(connection)  # what the client sends waits in the kernel
            until = min(time.monotonic() + _STALL_TIMEOUT_S, math.inf if rpc.deadline is None else rpc.deadline)
            connection.waiting_call = _WaitingCall(call, rpc, until)

    def _receive_waiting(self) -> None:
        """Lends connections whose calls wait for a thread, as far as there are threads."""
        while (connection := self._thread_shares.serve_next()) is not None:
            waiting, connection.waiting_call = connection.waiting_call, None
            assert waiting is not None
            self._lend(connection, partial(connection.handler.handle, waiting.call, waiting.rpc))

    def _end_receiving(self, connection: _Connection) -> None:
        """Gives the thread of a call, or its wait for one, to others."""
        if connection in self._receiving:
            del self._receiving[connection]
            connection.waiting_call = None
            self._thread_shares.leave(connection, connection.client)
            self._event_loop.call_soon(self._receive_waiting)

    def _check_waiting(self) -> None:
        """Refuses calls that have waited for a thread for too long."""
        now = time.monotonic()
        for connection in list(self._thread_shares.waiting):
            waiting = connection.waiting_call
            assert waiting is not None
            if waiting.until <= now:
                self._end_receiving(connection)
                deadline = waiting.rpc.deadline
                if deadline is not None and deadline <= now:
                    error: Exception = TimeoutError("the deadline has passed while the call waited for a thread")
                else:
                    error = OverloadedError("this client has its share of the threads that receive messages", _RETRY_S)
                self._refuse(connection, waiting.call, error)

    def _abandon(self, connection: _Connection, inline: _InlineCall) -> None:
        """Gives an inline call up, whose client is gone; a request that is being computed runs to its end."""
        self._forget_call(connection)
        inline.is_abandoned = True
        assert inline.staged.job is not None
        if self._servicer.batcher.leave(inline.staged.job, CancelledError()):
            inline.staged.close()

    def _forget_call(self, connection: _Connection) -> None:
        connection.inline_call = None
        self._with_inline_call.remove(connection)

    def _lend(self, connection: _Connection, action: Callable[[], None]) -> bool:
        """Lends a connection to a thread, for an action that may wait; closes it and returns False if there is none."""
        self._idle.pop(connection, None)
        self._unwatch(connection)
        connection.http.blocking = True
        self._lent.add(connection)
        try:
            self.threads.submit(partial(self._run_in_thread, connection, action))
        except RuntimeError as error:  # the system has no more threads
            self._fail(connection, error)
            return False
        return True

    def _run_in_thread(self, connection: _Connection, action: Callable[[], None]) -> None:
        is_usable = False
        try:
            action()
            is_usable = True
        except Exception as error:
            self._log_failure(connection, error)
        finally:
            self._event_loop.call_soon(partial(self._return_from_thread, connection, is_usable=is_usable))

    def _return_from_thread(self, connection: _Connection, *, is_usable: bool) -> None:
        self._lent.discard(connection)
        self._end_receiving(connection)
        if is_usable:
            connection.http.blocking = False
            connection.moved, connection.frame_budget = connection.http.io.moved, connection.http.frame_budget
            self._await_call(connection)
        else:
            self._close(connection)

    def _fail(self, connection: _Connection, error: Exception) -> None:
        self._log_failure(connection, error)
        self._close(connection)

    def _log_failure(self, connection: _Connection, error: Exception) -> None:
        """Logs why a connection ends, and counts a client's breach of the protocol."""
        if isinstance(error, http2.ProtocolError):
            self._metrics.refused_connection("protocol")
            self._on_breach(connection.client, _BREACH_SCORE)
        if isinstance(error, (ConnectionError, TimeoutError)):
            logger.debug("a connection ended: %s", error)
        else:
            logger.error("a connection failed", exc_info=error)

    def _close(self, connection: _Connection) -> None:
        if connection.inline_call is not None:
            self._abandon(connection, connection.inline_call)
        self._forget(connection)
        connection.http.close()

    def _forget(self, connection: _Connection) -> None:
        self._unwatch(connection)
        self._lent.discard(connection)
        self._end_receiving(connection)
        self._idle.pop(connection, None)
        self._paused.pop(connection, None)
        self._amid_frame.pop(connection, None)
        self._places(connection).leave(connection)
        self._all.discard(connection)
        if self._draining and not self._all:
            self.drained.set()


def _awaits_message(connection: _Connection) -> bool:
    """Returns whether the client has to send more of a call."""
    stream = connection.http.stream  # another thread may end it
    return isinstance(stream, http2.ServerCall) and not stream.is_fully_received


def _send_response(inline: _InlineCall) -> bool:
    """Sends the response of a computed call; returns False, and sends nothing, if the client may have to be waited for.

    Raises:
        Exception: Why the request could not be computed, or the response not be sent.
    """
    inline.staged.check()
    pieces = inline.staged.response()
    nbytes = sum(map(len, pieces))
    if nbytes > _MAX_INLINE_RESPONSE_NBYTES or not inline.call.has_window_for(nbytes):
        return False
    inline.call.send_message(*pieces, more=True)
    inline.call.end()
    return True
