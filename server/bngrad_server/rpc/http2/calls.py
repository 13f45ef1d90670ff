"""The calls of the HTTP/2 port, on its event loop.

A small call is served inline: the event loop reads it, submits it, and sends the response once a worker has computed
it. Whatever may wait is handled by a thread, to which the event loop lends the connection meanwhile. Threads that
receive a call's message are shared evenly among clients: beyond its share, a call waits without one.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from bngrad_server.errors import UnauthenticatedError
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.http2.connection import Caller, Connection, InlineCall, Lane, connection_of
from bngrad_server.rpc.http2.connections import Http2Connections
from bngrad_server.rpc.http2.handlers import Http2Handler, deadline_of, is_op, is_sdk
from bngrad_server.rpc.http2.inline_calls import InlineCalls
from bngrad_server.rpc.http2.lanes.arriving import ArrivingCalls
from bngrad_server.rpc.http2.lanes.watches import HealthWatches
from bngrad_server.rpc.http2.limits.futile_calls import FutileCalls, is_before
from bngrad_server.rpc.http2.limits.waste import OTHER_WEIGHT
from bngrad_server.rpc.http2.receiving import ReceivingCalls
from bngrad_server.rpc.other_calls import WATCH_PATH
from bngrad_server.rpc.servicer import EXCHANGE_PATH, UNARY_OPS, Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_wire import http2
from bngrad_wire.fields import Buffer

logger = logging.getLogger(__name__)

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
        health: Health,
        event_loop: EventLoop,
        on_breach: Callable[[str, float], object],
        on_stranger: Callable[[socket.socket, http2.MultiplexedConnection, str], object],
    ) -> None:
        """Has no connections yet.

        Args:
            servicer: Answers the calls.
            health: What calls watch.
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
            servicer.transfers.allowance_s,
            has_long_calls=computed_nbytes > 0,
        )
        self._event_loop = event_loop
        self._on_stranger = on_stranger
        self._futile = FutileCalls()
        self._arriving = ArrivingCalls()
        self._watches = HealthWatches(health, event_loop, self._end_watch)
        self._max_whole_nbytes = max(_WHOLE_NBYTES, computed_nbytes)
        self._inline_calls = InlineCalls(servicer, self._finish_soon)
        self._is_worthwhile = servicer.admission.is_worthwhile
        self._receiving = ReceivingCalls(is_worthwhile=self._is_worthwhile, max_wait_s=servicer.max_wait_s)
        servicer.admission.on_leave.append(self._after_request)
        event_loop.on_tick = self._on_tick

    def add(
        self,
        sock: socket.socket,
        http: http2.MultiplexedConnection,
        handler: Http2Handler,
        call: http2.ServerCall,
        rpc: RpcContext,
    ) -> None:
        """Adds a connection with its first call, whose token and path are good; closes it if there is no room."""
        connection = Connection(sock, http, handler, rpc.client)
        if not self.connections.add(connection, map(connection_of, self._receiving.awaiting_messages())):
            http.close()
            return
        try:
            http.max_whole_nbytes = min(self._max_whole_nbytes, http.max_whole_nbytes)
            http2.set_timeout(sock, _WAIT_S)
            http.io.waits = round(_STALL_TIMEOUT_S / _WAIT_S)
            if is_sdk(call):
                http.may_multiplex = False
                self._on_call(connection, call, time.perf_counter(), rpc)
            else:
                # Calls of a client at its limit wait for a thread rather than arrive and be refused.
                http.may_take_memory = partial(self._is_worthwhile, rpc.client)
                self._add_lane(connection, self.connections.lanes.multiplex(connection, _WAIT_S), call, rpc)
                self._begin_arrived(connection)
                self.connections.lanes.settle(connection)
        except Exception as error:
            self.connections.fail(connection, error)

    def _on_readable(self, connection: Connection) -> None:
        if not connection.is_watched:  # it was lent, paused or closed meanwhile
            return
        began = time.perf_counter()
        if connection.http.is_multiplexed:
            self._read_lanes(connection, began)
            return
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

    def _read_lanes(self, connection: Connection, began: float) -> None:
        """Reads from a connection with several calls."""
        http = connection.http
        is_reading = http.is_reading
        http.is_corked = True
        try:
            try:
                begun, failed, heard = http.read() if is_reading else ([], [], [])
            except MemoryError:  # what was received is still there, and calls that have memory end meanwhile
                logger.warning("a connection is read later, as there is no memory now", exc_info=True)
                self.connections.readers.pause(connection)
                return
            if http.has_handled:  # so another frame is the last one
                self.connections.readers.amid_frame.pop(connection, None)
            for carrier, call in begun:
                self._add_lane(connection, carrier, call)
            for stream_id in failed:
                self._check_lane(connection.lanes[stream_id])
            weight = self._begin_arrived(connection, [*(call.id for _, call in begun), *heard])
        except Exception as error:
            self.connections.fail(connection, error)
            return
        finally:
            http.is_corked = False
        if is_reading:
            was_useful = http.was_useful and weight == 1  # small answers are no DATA to speak of
            self.connections.count_waste(connection, began, 0.0 if was_useful else weight)
        self.connections.endings.if_heard(connection)
        self.connections.lanes.settle(connection)

    def _check_lane(self, lane: Lane) -> None:
        """Gives up a call without a thread that the client has cancelled."""
        call = lane.lane.stream
        if not isinstance(call, http2.ServerCall):
            return
        if lane in self.connections.lent:
            return  # its thread sees it
        deadline = deadline_of(call) if lane.inline_call is None else lane.inline_call.rpc.deadline
        self._end_call(lane)
        call.end()
        self._count_cancelled(lane.connection, deadline)
        self.connections.await_call(lane)

    def _add_lane(
        self, connection: Connection, carrier: http2.Lane, call: http2.ServerCall, rpc: RpcContext | None = None
    ) -> None:
        carrier.io.waits = round(_STALL_TIMEOUT_S / _WAIT_S)
        self._arriving.add(self.connections.begin_lane(connection, carrier, call, rpc), call)

    def _begin_arrived(self, connection: Connection, heard: Iterable[int] | None = None) -> float:
        """Begins the calls of a connection with several that have arrived; returns how much of the time was wasted."""
        weight = 1.0
        for lane in self._arriving.ready(connection, heard):
            call = lane.lane.stream
            if isinstance(call, http2.ServerCall):
                if self._begin(lane, call, lane.rpc) or lane.stream_id in connection.lanes:
                    weight = min(weight, _weight_of(call))
            else:  # it was refused at once
                self.connections.await_call(lane)
        return weight

    def _on_call(
        self, connection: Connection, call: http2.ServerCall, began: float, rpc: RpcContext | None = None
    ) -> None:
        """Begins a call; counts the time since ``began`` as wasted if it was refused, and some of it if it is no op."""
        idle = self.connections.idle
        del idle[connection]
        self.connections.readers.amid_frame.pop(connection, None)
        was_refused = not self._begin(connection, call, rpc) and connection in idle
        self.connections.count_waste(connection, began, 1.0 if was_refused else _weight_of(call))

    def _on_readable_amid_call(self, connection: Connection, inline: InlineCall) -> None:
        if inline.call.failure is not None:
            self._inline_calls.abandon(connection, inline)
            inline.call.end()
            self._count_cancelled(connection, inline.rpc.deadline)
            self.connections.await_call(connection)
        else:
            self.connections.after_frames(connection)

    def _count_cancelled(self, connection: Connection, deadline: float | None) -> None:
        if is_before(deadline):
            self._futile.cancelled(connection.client)
            if self._futile.are_too_many(connection.client):
                self.connections.penalise(connection)

    def _on_tick(self) -> None:
        for caller, inline, error in self._inline_calls.expired():
            self._refuse(caller, inline.call, error)
        for caller, waiting, error in self._receiving.expired():
            self._end_call(caller)
            self._refuse(caller, waiting.call, error)
        for connection in self._arriving:
            self._begin_arrived(connection)
        self._receive_waiting()  # a request may have left in the moment in which a call began to wait
        self._watches.tick()
        self.connections.tick()

    def _begin(self, caller: Caller, call: http2.ServerCall, rpc: RpcContext | None) -> bool:
        """Begins a call: inline if its message has arrived and memory is free, else in a thread.

        Returns whether it has been answered already.
        """
        if call.failure is not None:  # reset at once
            call.end()
            self._count_cancelled(connection_of(caller), deadline_of(call))
            self.connections.await_call(caller)
            return False
        try:
            if rpc is None:
                rpc = caller.handler.checked_context(call)
            received = call.received_messages()
            if received and caller.handler.answer_at_once(call, received, rpc):
                self.connections.await_call(caller)
                return True
            self._begin_to_compute(caller, call, received, rpc)
        except Exception as error:
            self._refuse(caller, call, error)
        return False

    def _begin_to_compute(
        self, caller: Caller, call: http2.ServerCall, received: Sequence[Buffer] | None, rpc: RpcContext
    ) -> None:
        """Begins a call that is not answered at once; ``received`` are its messages if all have arrived."""
        if isinstance(caller, Lane) and call.path == WATCH_PATH:
            self._watches.begin(caller, call, rpc)
        elif call.path in UNARY_OPS and call.is_fully_received:
            message = caller.handler.receive_request(call, rpc)
            if not self._inline_calls.begin(caller, call, message, rpc):
                self.connections.lend(caller, partial(caller.handler.handle_unary, call, message, rpc))
        elif not (
            received and call.path == EXCHANGE_PATH and self._inline_calls.begin_exchange(caller, call, received, rpc)
        ):
            self._receive(caller, call, rpc)

    def _end_watch(self, lane: Lane, error: Exception | None) -> None:
        call = lane.lane.stream
        if error is not None and isinstance(call, http2.ServerCall):
            self._refuse(lane, call, error)
        else:
            if isinstance(call, http2.ServerCall):
                call.end()
            self.connections.await_call(lane)

    def _finish_soon(self, caller: Caller, inline: InlineCall) -> None:
        self._event_loop.call_soon(partial(self._finish, caller, inline))

    def _finish(self, caller: Caller, inline: InlineCall) -> None:
        """Answers an inline call whose request has ended."""
        staged = inline.staged
        if inline.is_abandoned:
            staged.close()
            return
        self._inline_calls.forget(caller)
        try:
            was_sent = inline.send_response(caller.handler)
        except Exception as error:
            staged.close(error)
            self._refuse(caller, inline.call, error)
            return
        if was_sent:
            self._futile.answered(caller.client)
            staged.close()
            self.connections.await_call(caller)
        else:
            self.connections.lend(caller, partial(caller.handler.send_response, inline.call, staged))

    def _refuse(self, caller: Caller, call: http2.ServerCall, error: Exception) -> None:
        try:
            caller.handler.refuse(call, error)
            if not isinstance(error, UnauthenticatedError):
                self.connections.await_call(caller)
            elif isinstance(caller, Connection):
                self.connections.forget(caller)
                self._on_stranger(caller.sock, caller.http, caller.client)
            elif isinstance(caller, Lane):
                self.connections.await_call(caller)
                self.connections.endings.after_calls(caller.connection)
        except Exception as broken:
            self.connections.fail(caller, broken)

    def _receive(self, caller: Caller, call: http2.ServerCall, rpc: RpcContext) -> None:
        """Receives the message of a call in a thread, as soon as its client may have one more."""
        if self._receiving.add(caller, call, rpc):
            self.connections.lend(caller, partial(caller.handler.handle, call, rpc))
        elif isinstance(caller, Connection):
            self.connections.readers.unwatch(caller)

    def _after_request(self) -> None:
        """Is called by any thread after a request has left, where clients have limits."""
        if self._receiving.is_waited_for:
            self._event_loop.call_soon(self._receive_waiting)

    def _receive_waiting(self) -> None:
        for caller, waiting in self._receiving.served():
            self.connections.lend(caller, partial(caller.handler.handle, waiting.call, waiting.rpc))

    def _end_call(self, caller: Caller) -> None:
        """Gives up the call of a caller, if it has one, and its thread or its wait for one."""
        if isinstance(caller, Lane):
            self._arriving.forget(caller)
            self._watches.forget(caller)
        if caller.inline_call is not None:
            self._inline_calls.abandon(caller, caller.inline_call)
        if self._receiving.discard(caller):
            self._event_loop.call_soon(self._receive_waiting)


def _weight_of(call: http2.ServerCall) -> float:
    """How much of the time for a good call counts as wasted."""
    return 0.0 if is_op(call) else OTHER_WEIGHT
