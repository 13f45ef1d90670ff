"""The connections of the HTTP/2 port, on its event loop.

A small unary call is served inline: the event loop reads it, submits it, and sends the response once a worker has
computed it. Whatever may wait is handled by a thread, to which the event loop lends the connection meanwhile.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial

from bngrad_server.rpc.http2_handlers import Http2Handler, abort, refuse
from bngrad_server.rpc.servicer import UNARY_OPS, Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.runtime.executors import OnDemandExecutor
from bngrad_server.staged_request import StagedRequest
from bngrad_wire import http2

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512
"""For one more, the connection that was idle longest is closed, first of all one that never made a call. If none is
idle, the new one is closed; its client falls back to grpcio."""
_WEIGHT_OF_RESET = 100
"""A call that was reset before it began counts as this many idle frames: a client rarely has a reason for it."""
_STALL_TIMEOUT_S = 60.0
"""How long a client may pause in the middle of a frame or a call."""
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


class _Connection:
    """A connection: idle, or with an inline call, or lent to a thread.

    Attributes:
        sock: Its socket.
        fd: The socket's descriptor.
        http: The HTTP/2 connection.
        handler: Handles its calls in threads.
        inline_call: Its running call, if it has no thread.
        is_watched: Whether the event loop reads from it; then no thread uses it.
        is_outdated: Whether it is to be closed after the call that it has.
    """

    def __init__(self, sock: socket.socket, client: str, servicer: Servicer) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.http = http2.ServerConnection(sock)
        self.handler = Http2Handler(servicer, sock, client)
        self.inline_call: _InlineCall | None = None
        self.is_watched = False
        self.is_outdated = False


class Http2Connections:
    """All connections of the port. Its methods, except `__len__`, are for the event loop's thread.

    Attributes:
        drained: Is set once `drain` was called and no connection is left.
        threads: The threads of calls that may wait.
    """

    def __init__(self, servicer: Servicer, event_loop: EventLoop) -> None:
        self.drained = threading.Event()
        self.threads = OnDemandExecutor("http2-call")
        self._servicer = servicer
        self._metrics = servicer.observer.metrics
        self._event_loop = event_loop
        self._all: set[_Connection] = set()
        self._idle: dict[_Connection, None] = {}  # the one that was idle longest comes first
        self._with_inline_call: set[_Connection] = set()
        self._draining = False
        event_loop.on_tick = self._check_deadlines

    def __len__(self) -> int:
        return len(self._all)

    def add(self, sock: socket.socket, client: str) -> None:
        """Adds an accepted connection of a client, see `RpcContext.client`; closes it if there is no room."""
        if self._draining or not self._make_room():
            sock.close()
            return
        try:
            http2.set_timeout(sock, _STALL_TIMEOUT_S)
            connection = _Connection(sock, client, self._servicer)
        except OSError:
            sock.close()
            return
        self._all.add(connection)
        self._return_from_thread(connection, is_usable=True)

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
            connection.is_outdated = isinstance(connection.sock, http2.TlsSocket)
            if connection.is_outdated and connection in self._idle:
                self._close(connection)

    def abort(self) -> None:
        """Ends every connection at once."""
        for connection in self._all:
            abort(connection.sock)

    def _make_room(self) -> bool:
        """Returns whether there is room for a connection, after closing an idle one if there was none."""
        if len(self._all) < _MAX_CONNECTIONS:
            return True
        self._metrics.refused_connection("full")
        if self._idle:
            never_called = (connection for connection in self._idle if not connection.http.last_stream_id)
            self._close(next(never_called, next(iter(self._idle))))
        return len(self._all) < _MAX_CONNECTIONS

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
        if not connection.is_watched:
            connection.is_watched = True
            self._event_loop.add_reader(connection.fd, partial(self._on_readable, connection))

    def _unwatch(self, connection: _Connection) -> None:
        if connection.is_watched:
            connection.is_watched = False
            self._event_loop.remove_reader(connection.fd)

    def _on_readable(self, connection: _Connection) -> None:
        if not connection.is_watched:  # it was lent or closed meanwhile
            return
        http = connection.http
        try:
            call = http.accept_nonblocking()
            if connection.inline_call is not None:
                self._on_readable_amid_call(connection, connection.inline_call)
            elif call is not None:
                del self._idle[connection]
                self._begin(connection, call)
            elif http.has_pending_input and http.needs_blocking_read:
                self._lend(connection, partial(connection.handler.finish_frame, http))
            else:
                http.flush()
                if http.outbound:
                    self._lend(connection, partial(connection.handler.flush, http))
        except Exception as error:
            self._fail(connection, error)

    def _on_readable_amid_call(self, connection: _Connection, inline: _InlineCall) -> None:
        if inline.call.failure is not None:
            self._abandon(connection, inline)
            inline.call.end()
            self._await_call(connection)
        elif connection.http.has_pending_input:
            self._unwatch(connection)  # until the call has ended: there may be no room for more
        else:
            connection.http.flush()

    def _begin(self, connection: _Connection, call: http2.ServerCall) -> None:
        """Begins a call: inline if its message has arrived and memory is free, else in a thread."""
        if call.failure is not None:
            connection.http.count_idle_frame(_WEIGHT_OF_RESET)
            call.end()
            self._await_call(connection)
            return
        handler = connection.handler
        try:
            rpc = handler.context(call, lambda: call.failure is not None)
            if call.path not in UNARY_OPS or not call.is_fully_received:
                self._lend(connection, partial(handler.handle, call, rpc))
                return
            data = handler.receive_request(call, rpc)
            inline = _InlineCall(call, rpc)
            on_end = partial(self._event_loop.call_soon, partial(self._finish, connection, inline))
            staged = self._servicer.submit(UNARY_OPS[call.path], data, rpc, on_end)
        except Exception as error:
            self._refuse(connection, call, error)
            return
        if staged is None:
            self._lend(connection, partial(handler.handle_unary, call, data, rpc))
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
        elif not self._lend(connection, partial(connection.handler.send_response, inline.call, staged, inline.rpc)):
            staged.close()

    def _refuse(self, connection: _Connection, call: http2.ServerCall, error: Exception) -> None:
        try:
            refuse(call, error)
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
            self._log_failure(error)
        finally:
            self._event_loop.call_soon(partial(self._return_from_thread, connection, is_usable=is_usable))

    def _return_from_thread(self, connection: _Connection, *, is_usable: bool) -> None:
        if is_usable:
            connection.http.blocking = False
            self._await_call(connection)
        else:
            self._close(connection)

    def _fail(self, connection: _Connection, error: Exception) -> None:
        self._log_failure(error)
        self._close(connection)

    def _log_failure(self, error: Exception) -> None:
        """Logs why a connection ends, and counts a client's breach of the protocol."""
        if isinstance(error, http2.ProtocolError):
            self._metrics.refused_connection("protocol")
        if isinstance(error, (ConnectionError, TimeoutError)):
            logger.debug("a connection ended: %s", error)
        else:
            logger.error("a connection failed", exc_info=error)

    def _close(self, connection: _Connection) -> None:
        self._unwatch(connection)
        if connection.inline_call is not None:
            self._abandon(connection, connection.inline_call)
        connection.http.close()
        self._idle.pop(connection, None)
        self._all.discard(connection)
        if self._draining and not self._all:
            self.drained.set()


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
