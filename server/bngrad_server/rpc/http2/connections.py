"""The connections of the HTTP/2 port, between their calls and during them.

The event loop reads from an idle connection. To a thread, which may wait, it lends the connection meanwhile. One that
only costs time, with frames or calls that lead to nothing, is paused; one that is to be closed has its last answer
delivered before.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from bngrad_server.rpc.http2.connection import Connection
from bngrad_server.rpc.http2.delivery import Deliveries
from bngrad_server.rpc.http2.handlers import abort
from bngrad_server.rpc.http2.limits.penalties import Penalties, peer_of
from bngrad_server.rpc.http2.limits.places import Places
from bngrad_server.rpc.http2.limits.waste import Paused
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.runtime.executors import OnDemandExecutor
from bngrad_server.telemetry.metrics import Metrics
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


class Http2Connections:
    """All connections of the port with a good call. Its methods, except `__len__`, are for the event loop's thread.

    Attributes:
        drained: Is set once `drain` was called and no connection is left.
        threads: The threads of calls that may wait.
        idle: The connections without a call; the one that was idle longest comes first.
        amid_frame: Those of them that have sent a part of a frame, and since when.
    """

    def __init__(
        self,
        event_loop: EventLoop,
        metrics: Metrics,
        on_breach: Callable[[str, float], object],
        on_readable: Callable[[Connection], None],
        on_release: Callable[[Connection], None],
        *,
        has_long_calls: bool = False,
    ) -> None:
        """Has no connections yet.

        Args:
            event_loop: Reads from the connections.
            metrics: Counts the connections that are refused.
            on_breach: Called with the client of a connection that broke the protocol, and what that counts for.
            on_readable: Reads from a connection, if that is watched.
            on_release: Ends the call of a connection that a thread has given back, or that is no longer of the port.
            has_long_calls: Whether larger calls keep the event loop, as they are computed there.
        """
        self.drained = threading.Event()
        self.threads = OnDemandExecutor("http2-call")
        self.idle: dict[Connection, None] = {}
        self.amid_frame: dict[Connection, float] = {}
        self._event_loop = event_loop
        self._metrics = metrics
        self._on_breach = on_breach
        self._on_readable = on_readable
        self._on_release = on_release
        self._has_long_calls = has_long_calls
        self._all: set[Connection] = set()
        self._lent: set[Connection] = set()
        self._remote: Places[Connection] = Places(_PLACES)
        self._local: Places[Connection] = Places(_PLACES)
        self._paused: Paused[Connection] = Paused()
        self._penalties = Penalties()
        self._closing = Deliveries()
        self._draining = False

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection, busy: Iterable[Connection]) -> bool:
        """Adds an idle connection, in place of another one, if need be; returns False if it cannot.

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

    def await_call(self, connection: Connection) -> None:
        """Waits for the next call of a connection, after malformed messages without reading it for a while."""
        if connection.handler.saw_malformed:
            connection.handler.saw_malformed = False
            self.penalise(connection)
        if connection.http.outbound:  # more than the socket took at once
            self._lend_to_flush(connection)
        elif self._draining or connection.is_outdated:
            self._close_once_delivered(connection)
        else:
            self.idle[connection] = None
            self._watch(connection)
            if connection.http.has_pending_input:
                self._read_soon(connection)

    def after_frames(self, connection: Connection) -> None:
        """Answers frames that began no call, and goes on to read."""
        http = connection.http
        http.flush()
        if http.has_pending_input:
            self._read_soon(connection)
        if connection.inline_call is not None:
            return
        if http.is_amid_frame:
            self.amid_frame.setdefault(connection, time.monotonic())
        else:
            self.amid_frame.pop(connection, None)
        if http.outbound:
            self._lend_to_flush(connection)

    def count_waste(self, connection: Connection, began: float) -> None:
        """Counts the time since ``began``, in which a connection did nothing useful; pauses it if that is too much."""
        if connection.waste.count(began) and connection in self._all:
            self.unwatch(connection)
            self._paused.add(connection)

    def penalise(self, connection: Connection) -> None:
        """Counts a futile call of a client, and suspends the connection if there were too many."""
        client = peer_of(connection.client)
        self._on_breach(client, _FUTILE_SCORE)
        self._penalties.add(client, _FUTILE_SCORE)
        if delay_s := self._penalties.delay_s(client):
            self.unwatch(connection)
            self._paused.suspend(connection, delay_s)

    def _watch(self, connection: Connection) -> None:
        """Reads from a connection, unless it is paused; expects that its next call is as large as the last one.

        Closes one that the system cannot watch: its client would wait in vain.
        """
        if connection in self._paused:
            return
        try:
            if not connection.is_watched:
                self._event_loop.add_reader(connection.fd, partial(self._on_readable, connection))
                connection.is_watched = True
            if self._has_long_calls and connection.http.expects_large_call:
                self._event_loop.expect_long(connection.fd, connection.client)
            else:
                self._event_loop.expect_brief(connection.fd)
        except OSError as error:  # the system has no memory for it, or watches as many descriptors as it may
            self.fail(connection, error)

    def unwatch(self, connection: Connection) -> None:
        """Reads no longer from a connection: what its client sends waits in the kernel."""
        if connection.is_watched:
            connection.is_watched = False
            self._event_loop.remove_reader(connection.fd)

    def _read_soon(self, connection: Connection) -> None:
        self._event_loop.call_soon(partial(self._on_readable, connection))

    def tick(self) -> None:
        """Does what is due; to be called several times a second."""
        for connection in self._paused.resume():
            if connection in self.idle or connection.inline_call is not None:
                self._watch(connection)
                self._read_soon(connection)
        self._check_frames()
        for connection in self._closing:
            self._close_once_delivered(connection)

    def _check_frames(self) -> None:
        """Closes connections whose frames do not end."""
        now = time.monotonic()
        for connection, since in list(self.amid_frame.items()):
            if connection.http.awaits_rest:
                self._on_readable(connection)
            elif connection not in self.idle:  # it has a thread, which has limits of its own
                del self.amid_frame[connection]
            elif now - since > _FRAME_TIMEOUT_S:
                self._metrics.refused_connection("silent")
                self._on_breach(connection.client, _BREACH_SCORE)
                self._close(connection)

    def lend(self, connection: Connection, action: Callable[[], None]) -> None:
        """Lends a connection to a thread, for an action that may wait."""
        self.idle.pop(connection, None)
        self.unwatch(connection)
        connection.http.blocking = True
        self._lent.add(connection)
        self.threads.submit(partial(self._run_in_thread, connection, action))

    def _lend_to_flush(self, connection: Connection) -> None:
        self.lend(connection, partial(connection.handler.flush, connection.http))

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
        self._on_release(connection)
        if is_usable:
            connection.http.blocking = False
            connection.waste.begin_reading()
            self.await_call(connection)
        else:
            self._close(connection)

    def fail(self, connection: Connection, error: Exception) -> None:
        """Closes a connection because of an error, which it logs."""
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

    def drain(self) -> None:
        """Accepts no more calls; closes each connection after the call that it has."""
        self._draining = True
        for connection in list(self.idle):
            self._close_once_delivered(connection)
        if not self._all:
            self.drained.set()

    def renew(self) -> None:
        """Closes TLS connections after the calls that they have, so that clients show their certificates again."""
        for connection in list(self._all):
            connection.is_outdated |= isinstance(connection.sock, http2.TlsSocket)
            if connection.is_outdated and connection in self.idle:
                self._close_once_delivered(connection)

    def abort(self) -> None:
        """Ends every connection at once."""
        for connection in list(self._all):
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        """Closes a connection; one that is lent, once its thread has seen it broken."""
        if connection in self._lent:
            connection.is_outdated = True
            abort(connection.sock)
        else:
            self._close(connection)

    def _close_once_delivered(self, connection: Connection) -> None:
        """Closes a connection without a call once its client has the last answer; does not read from it until then."""
        if self._closing.is_over(connection):
            self._close(connection)
            return
        self.unwatch(connection)
        self.idle.pop(connection, None)
        self.amid_frame.pop(connection, None)

    def _close(self, connection: Connection) -> None:
        self.forget(connection)
        connection.http.close()

    def forget(self, connection: Connection) -> None:
        """Gives a connection up, without closing it."""
        self._on_release(connection)
        connection.handler.close()
        self.unwatch(connection)
        self._lent.discard(connection)
        self.idle.pop(connection, None)
        self._paused.discard(connection)
        self.amid_frame.pop(connection, None)
        self._closing.discard(connection)
        self._places(connection).leave(connection)
        self._all.discard(connection)
        if self._draining and not self._all:
            self.drained.set()
