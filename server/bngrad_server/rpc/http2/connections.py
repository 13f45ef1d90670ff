"""The connections of the HTTP/2 port, between their calls and during them.

The event loop reads from an idle connection. To a thread, which may wait, it lends the connection meanwhile. One that
only costs time, with frames or calls that lead to nothing, is paused.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from bngrad_server.rpc.http2.connection import Caller, Connection, Lane
from bngrad_server.rpc.http2.endings import Endings
from bngrad_server.rpc.http2.lanes.lanes import Lanes
from bngrad_server.rpc.http2.lending import Lending
from bngrad_server.rpc.http2.limits.penalties import Penalties, peer_of
from bngrad_server.rpc.http2.limits.places import Places
from bngrad_server.rpc.http2.reading import Readers
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.runtime.listening import max_connections
from bngrad_server.runtime.pauses import Pauses
from bngrad_server.telemetry.metrics import Metrics
from bngrad_wire import http2

logger = logging.getLogger(__name__)

_BREACH_SCORE = 16.0
"""What a breach of the protocol counts for in `bngrad_server.rpc.http2.limits.penalties`."""
_FUTILE_SCORE = 2.0
"""What a call with a malformed message, or one more that was cancelled, counts for, there and for the next calls."""


class Http2Connections:
    """All connections of the port with a good call. Its methods, except `__len__`, are for the event loop's thread.

    Attributes:
        drained: Is set once `drain` was called, no connection is left, and no thread has a lane of one.
        idle: The connections without a call; the one that was idle longest comes first.
        readers: The connections that are read from.
        lent: Those that threads have, and such lanes.
        lanes: The lanes of connections that may have several calls.
        endings: The connections that are to be closed.
    """

    def __init__(
        self,
        event_loop: EventLoop,
        metrics: Metrics,
        on_breach: Callable[[str, float], object],
        on_readable: Callable[[Connection], None],
        on_release: Callable[[Caller], None],
        allowance_s: Callable[[int], float],
        *,
        has_long_calls: bool = False,
    ) -> None:
        """Has no connections yet.

        Args:
            event_loop: Reads from the connections.
            metrics: Counts the connections that are refused.
            on_breach: Called with the client of a connection that broke the protocol, and what that counts for.
            on_readable: Reads from a connection, if that is watched.
            on_release: Ends the call of a caller that a thread has given back, or that is no longer of the port.
            allowance_s: How long a client may take for so many bytes of an answer.
            has_long_calls: Whether larger calls keep the event loop, as they are computed there.
        """
        self.drained = threading.Event()
        self.idle: dict[Connection, None] = {}
        self.readers = Readers(event_loop, on_readable, self._on_end, has_long_calls=has_long_calls)
        self.lent = Lending(event_loop, self._log_failure, self._after_thread)
        self.lanes = Lanes(event_loop, self.readers, self._is_served, self._after_call, self.fail, allowance_s)
        self.endings = Endings(self.idle, self.lanes.settle, self._stop_reading, self._close)
        self._metrics = metrics
        self._on_breach = on_breach
        self._on_release = on_release
        self._all: set[Connection] = set()
        self._remote: Places[Connection] = Places(max_connections())
        self._local: Places[Connection] = Places(max_connections())
        self._penalties = Penalties()
        self._draining = False
        self._pauses = Pauses()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection, busy: Iterable[Connection]) -> bool:
        """Adds an idle connection, in place of another one, if need be; returns False if it cannot.

        For one too many, the client that has most of them loses the one that was idle longest, or else, if the new
        one's client has fewer, the one whose message has been awaited longest.

        Args:
            connection: The connection.
            busy: Those that may be closed for it although they are not idle.
        """
        places = self._places(connection)
        if self._draining or not self._make_room(places, connection.client, busy):
            return False
        self._all.add(connection)
        places.take(connection, connection.client)
        self.idle[connection] = None
        self._watch(connection)
        return connection in self._all

    def _places(self, connection: Connection) -> Places[Connection]:
        return self._local if connection.sock.family == socket.AF_UNIX else self._remote

    def _make_room(self, places: Places[Connection], client: str, busy: Iterable[Connection]) -> bool:
        """Returns whether there is a free place for a client, after closing a connection if there was none."""
        if places.is_full:
            self._metrics.refused_connection("full")
            dispensable = places.to_give_up(client, self.idle, busy)
            if dispensable is not None:
                places.leave(dispensable)
                self._end(dispensable)
        return not places.is_full

    def begin_lane(
        self, connection: Connection, carrier: http2.Lane, call: http2.ServerCall, rpc: RpcContext | None
    ) -> Lane:
        """See `bngrad_server.rpc.http2.lanes.lanes.Lanes.begin`."""
        self.idle.pop(connection, None)
        return self.lanes.begin(connection, carrier, call, rpc)

    def _is_served(self, connection: Connection) -> bool:
        return connection in self._all and not self.endings.is_delivering(connection)

    def _after_call(self, connection: Connection) -> None:
        """Goes on after one of the calls of a connection that may have several."""
        self._count_malformed(connection)
        if not connection.lanes and connection in self._all:
            if connection.is_outdated and not self.endings.is_announced(connection):
                self.endings.once_delivered(connection)
            else:
                self.idle[connection] = None

    def _count_malformed(self, connection: Connection) -> None:
        if connection.handler.saw_malformed:
            connection.handler.saw_malformed = False
            self.penalise(connection)

    def await_call(self, caller: Caller) -> None:
        """Waits for the next call of a connection, after malformed messages without reading it for a while.

        Of a lane, the call is ended, once its answer has been sent.
        """
        if isinstance(caller, Lane):
            self.lanes.end_once_delivered(caller)
            return
        assert isinstance(caller, Connection)
        connection = caller
        self._count_malformed(connection)
        if connection.http.outbound:  # more than the socket took at once
            self._lend_to_flush(connection)
        elif self._draining or connection.is_outdated:
            self.endings.once_delivered(connection)
        else:
            self.idle[connection] = None
            self._watch(connection)
            if connection.http.has_pending_input:
                self.readers.read_soon(connection)
            else:  # the next frame may have begun to arrive with the call
                self.readers.note_partial_frame(connection)

    def after_frames(self, connection: Connection) -> None:
        """Answers frames that began no call, and goes on to read."""
        http = connection.http
        http.flush()
        if http.has_pending_input:
            self.readers.read_soon(connection)
        if connection.inline_call is not None:
            return
        self.readers.note_partial_frame(connection)
        if http.outbound:
            self._lend_to_flush(connection)

    def count_waste(self, connection: Connection, began: float, weight: float = 1.0) -> None:
        """Counts the time since ``began``, or a part of it, as wasted; pauses a connection that wastes too much."""
        if weight == 0:
            connection.waste.reset(began)
        elif connection.waste.count(began, weight) and connection in self._all:
            self.readers.pause(connection)

    def penalise(self, connection: Connection) -> None:
        """Counts a futile call of a client, and suspends the connection if there were too many."""
        client = peer_of(connection.client)
        self._on_breach(client, _FUTILE_SCORE)
        self._penalties.add(client, _FUTILE_SCORE)
        if delay_s := self._penalties.delay_s(client):
            self.readers.suspend(connection, delay_s)

    def _on_end(self, connection: Connection) -> None:
        if connection not in self.lent:  # else its thread sees it
            self.fail(connection, http2.PeerGoneError("the client closed the connection while it was paused"))

    def _watch(self, connection: Connection) -> None:
        """Reads from a connection; closes one that the system cannot watch: its client would wait in vain."""
        try:
            self.readers.watch(connection)
        except OSError as error:
            self.fail(connection, error)

    def tick(self) -> None:
        """Does what is due; to be called several times a second."""
        pause_s = self._pauses.since_last_look()
        self.readers.excuse(pause_s)
        self.lanes.excuse(pause_s)
        for connection in self.readers.paused.resume():
            if connection.http.is_multiplexed:
                self.lanes.settle(connection)
            elif connection in self.idle or connection.inline_call is not None:
                self._watch(connection)
                self.readers.read_soon(connection)
        for connection in chain(self.readers.overdue(self._has_no_thread), self.lanes.give_up_overdue()):
            self._on_breach(connection.client, _BREACH_SCORE)
            self._metrics.refused_connection("silent")
            self._close(connection)
        self.endings.tick()

    def _has_no_thread(self, connection: Connection) -> bool:
        return connection in self.idle or bool(connection.lanes)

    def lend(self, caller: Caller, action: Callable[[], None]) -> None:
        """Lends a connection, or a lane of one, to a thread, for an action that may wait."""
        if isinstance(caller, Connection):
            self.idle.pop(caller, None)
            self.readers.unwatch(caller)
        self.lent.lend(caller, action)

    def _lend_to_flush(self, connection: Connection) -> None:
        self.lend(connection, partial(connection.handler.flush, connection.http))

    def _after_thread(self, caller: Caller, is_usable: bool) -> None:
        self._on_release(caller)
        try:
            if is_usable:
                self.await_call(caller)
            else:
                self._close(caller)
        finally:
            self._note_drained()  # a lane may come back after its connection was closed

    def fail(self, caller: Caller, error: Exception) -> None:
        """Closes a connection, or a lane of one, because of an error, which it logs."""
        self._log_failure(caller, error)
        self._close(caller)

    def _log_failure(self, caller: Caller, error: Exception) -> None:
        """Logs why a connection or lane ends, and counts a client's breach of the protocol."""
        if isinstance(error, http2.ProtocolError):
            self._on_breach(caller.client, _BREACH_SCORE)
            self._metrics.refused_connection("protocol")
        if isinstance(error, (ConnectionError, TimeoutError)):
            logger.debug("a connection ended: %s", error)
        else:
            logger.error("a connection failed", exc_info=error)

    def drain(self) -> None:
        """Accepts no more calls; closes each connection after the call that it has."""
        self._draining = True
        for connection in list(self._all):
            self.endings.announce(connection)
        self._note_drained()

    def renew(self) -> None:
        """Closes TLS connections after the calls that they have, so that clients show their certificates again.

        What is on its way is refused: its client may not be trusted any more.
        """
        for connection in list(self._all):
            if isinstance(connection.sock, http2.TlsSocket):
                self.endings.after_calls(connection)

    def abort(self) -> None:
        """Ends every connection at once."""
        for connection in list(self._all):
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        """Closes a connection; one that is lent, once its thread has seen it broken."""
        if connection in self.lent:
            connection.is_outdated = True
            http2.abort(connection.sock)
        else:
            self._close(connection)

    def _stop_reading(self, connection: Connection) -> None:
        self.readers.unwatch(connection)
        self.idle.pop(connection, None)
        self.readers.amid_frame.pop(connection, None)

    def _close(self, caller: Caller) -> None:
        if isinstance(caller, Lane):
            self._on_release(caller)
            self.lanes.end(caller)
        elif isinstance(caller, Connection):
            self.forget(caller)
            caller.http.close()

    def forget(self, connection: Connection) -> None:
        """Gives a connection up, without closing it."""
        self._on_release(connection)
        for lane in connection.lanes.values():
            self._on_release(lane)
            if lane not in self.lent:
                lane.lane.release()
        self.lanes.forget(connection)
        connection.handler.close()
        self.readers.forget(connection)
        self.lent.discard(connection)
        self.idle.pop(connection, None)
        self.endings.discard(connection)
        self._places(connection).leave(connection)
        self._all.discard(connection)
        self._note_drained()

    def _note_drained(self) -> None:
        if self._draining and not self._all and not self.lent:
            self.drained.set()
