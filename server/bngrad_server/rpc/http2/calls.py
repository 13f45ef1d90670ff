"""The calls of the HTTP/2 port, on its event loop.

A small call is served inline: the event loop reads it, submits it, and sends the response once a worker has computed
it. Whatever may wait is handled by a thread, to which the event loop lends the connection meanwhile. Threads that
receive a call's message are shared evenly among clients: beyond its share, a call waits without one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial

from bngrad_server.errors import UnauthenticatedError
from bngrad_server.rpc.futile_calls import FutileCalls, is_before
from bngrad_server.rpc.http2.connection import Connection, InlineCall
from bngrad_server.rpc.http2.connections import Http2Connections
from bngrad_server.rpc.http2.handlers import Http2Handler
from bngrad_server.rpc.http2.inline_calls import InlineCalls
from bngrad_server.rpc.http2.receiving import ReceivingCalls
from bngrad_server.rpc.servicer import EXCHANGE_PATH, UNARY_OPS, Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_wire import http2

_STALL_TIMEOUT_S = 60.0
"""How long a client may pause in the middle of a frame or a call."""
_WHOLE_NBYTES = 576 * 1024
"""Larger calls are received whole only if they are computed where they arrive: those that go to a worker are received
into the arena by a thread, in less time."""
_WAIT_S = 0.5
"""After this a thread that waits for a client notices that its transfer is to end."""


class Http2Calls:
    """Begins and ends the calls of all connections; for the event loop's thread.

    Attributes:
        connections: The connections.
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
        computed_nbytes = servicer.small_requests.max_nbytes
        self.connections = Http2Connections(
            event_loop,
            servicer.observer.metrics,
            on_breach,
            self._on_readable,
            self._end_call,
            has_long_calls=computed_nbytes > 0,
        )
        self._event_loop = event_loop
        self._on_stranger = on_stranger
        self._futile = FutileCalls()
        self._max_whole_nbytes = max(_WHOLE_NBYTES, computed_nbytes)
        self._inline_calls = InlineCalls(servicer, self._finish_soon)
        self._receiving = ReceivingCalls(is_worthwhile=servicer.admission.is_worthwhile, max_wait_s=servicer.max_wait_s)
        servicer.admission.on_leave.append(self._after_request)
        event_loop.on_tick = self._on_tick

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
        if not self.connections.add(connection, self._receiving.awaiting_messages()):
            http.close()
            return
        try:
            http.max_whole_nbytes = min(self._max_whole_nbytes, http.max_whole_nbytes)
            http2.set_timeout(sock, _WAIT_S)
            http.io.waits = round(_STALL_TIMEOUT_S / _WAIT_S)
            self._on_call(connection, call, time.perf_counter(), rpc)
        except Exception as error:
            self.connections.fail(connection, error)

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
                self.connections.after_frames(connection)
        except Exception as error:
            self.connections.fail(connection, error)
        self.connections.count_waste(connection, began)

    def _on_call(
        self, connection: Connection, call: http2.ServerCall, began: float, rpc: RpcContext | None = None
    ) -> None:
        """Begins a call; counts the time since ``began`` as wasted if it was refused."""
        idle = self.connections.idle
        del idle[connection]
        self.connections.amid_frame.pop(connection, None)
        if self._begin(connection, call, rpc) or connection not in idle:
            connection.waste.reset(began)
        else:
            self.connections.count_waste(connection, began)

    def _on_readable_amid_call(self, connection: Connection, inline: InlineCall) -> None:
        if inline.call.failure is not None:
            self._inline_calls.abandon(connection, inline)
            inline.call.end()
            self._count_cancelled(connection, inline.rpc)
            self.connections.await_call(connection)
        else:
            self.connections.after_frames(connection)

    def _count_cancelled(self, connection: Connection, rpc: RpcContext) -> None:
        if is_before(rpc.deadline):
            self._futile.cancelled(connection.client)
            if self._futile.are_too_many(connection.client):
                self.connections.penalise(connection)

    def _on_tick(self) -> None:
        for connection, inline, error in self._inline_calls.expired():
            self._refuse(connection, inline.call, error)
        for connection, waiting, error in self._receiving.expired():
            self._end_call(connection)
            self._refuse(connection, waiting.call, error)
        self._receive_waiting()  # a request may have left in the moment in which a call began to wait
        self.connections.tick()

    def _begin(self, connection: Connection, call: http2.ServerCall, rpc: RpcContext | None) -> bool:
        """Begins a call: inline if its message has arrived and memory is free, else in a thread.

        Returns whether it has been answered already.
        """
        if call.failure is not None:  # reset at once
            call.end()
            self.connections.await_call(connection)
            return False
        handler = connection.handler
        try:
            if rpc is None:
                rpc = handler.checked_context(call)
            received = call.received_messages()
            if received and handler.answer_at_once(call, received, rpc):
                self.connections.await_call(connection)
                return True
            if received and call.path == EXCHANGE_PATH:
                if not self._inline_calls.begin_exchange(connection, call, received, rpc):
                    self._receive(connection, call, rpc)
                return False
            if call.path not in UNARY_OPS or not call.is_fully_received:
                self._receive(connection, call, rpc)
                return False
            message = handler.receive_request(call, rpc)
            has_memory = self._inline_calls.begin(connection, call, message, rpc)
        except Exception as error:
            self._refuse(connection, call, error)
            return False
        if not has_memory:
            self.connections.lend(connection, partial(handler.handle_unary, call, message, rpc))
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
            self.connections.await_call(connection)
        else:
            self.connections.lend(connection, partial(connection.handler.send_response, inline.call, staged))

    def _refuse(self, connection: Connection, call: http2.ServerCall, error: Exception) -> None:
        try:
            connection.handler.refuse(call, error)
            if isinstance(error, UnauthenticatedError):
                self.connections.forget(connection)
                self._on_stranger(connection.sock, connection.http, connection.client)
            else:
                self.connections.await_call(connection)
        except Exception as broken:
            self.connections.fail(connection, broken)

    def _receive(self, connection: Connection, call: http2.ServerCall, rpc: RpcContext) -> None:
        """Receives the message of a call in a thread, as soon as its client may have one more."""
        if self._receiving.add(connection, call, rpc):
            self.connections.lend(connection, partial(connection.handler.handle, call, rpc))
        else:
            self.connections.unwatch(connection)

    def _after_request(self) -> None:
        """Is called by any thread after a request has left, where clients have limits."""
        if self._receiving.is_waited_for:
            self._event_loop.call_soon(self._receive_waiting)

    def _receive_waiting(self) -> None:
        for connection, waiting in self._receiving.served():
            self.connections.lend(connection, partial(connection.handler.handle, waiting.call, waiting.rpc))

    def _end_call(self, connection: Connection) -> None:
        """Gives up the call of a connection, if it has one, and its thread or its wait for one."""
        if connection.inline_call is not None:
            self._inline_calls.abandon(connection, connection.inline_call)
        if self._receiving.discard(connection):
            self._event_loop.call_soon(self._receive_waiting)
