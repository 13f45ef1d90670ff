"""The connections of an endpoint, as the poller's thread sees them."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial

from bngrad_server.rpc.http2_handlers import UNARY, Answers, hang_up, refuse
from bngrad_server.rpc.inline_calls import InlineCall
from bngrad_server.rpc.servicer import Servicer
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.runtime.executors import OnDemandExecutor
from bngrad_wire import http2

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512
"""For more, the one that was idle longest is closed, of those that never made a call if there are such; where none is
idle, the new one, whose client falls back to grpcio."""
_WEIGHT_OF_RESET = 100
_STALL_TIMEOUT_S = 60.0
"""How long a peer may stand still in the middle of a frame or a call."""


class _Connection:
    """A connection.

    Attributes:
        fd: Its file descriptor.
        http: What is spoken on it.
        answers: Answers its calls, in a thread.
        small_call: Its running call, if it has no thread.
        is_watched: Whether the poller watches it: nobody else uses it.
        is_outdated: Whether it is to end with the call that it has.
    """

    def __init__(self, sock: socket.socket, client: str, calls: Servicer) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.http = http2.ServerConnection(sock)
        self.answers = Answers(calls, sock, client)
        self.small_call: InlineCall | None = None
        self.is_watched = False
        self.is_outdated = False


class Connections:
    """Serves small calls at once, and hands all others to threads.

    A connection is idle, or has a small call, or is lent to a thread. But for `add` and `threads`, all is for the
    poller's thread.

    Attributes:
        ended: Is set once it is draining and no connection is left.
        threads: The threads.
    """

    def __init__(self, calls: Servicer, event_loop: EventLoop) -> None:
        self.ended = threading.Event()
        self.threads = OnDemandExecutor("call")
        self._calls = calls
        self._metrics = calls.observer.metrics
        self._event_loop = event_loop
        self._all: set[_Connection] = set()
        self._idle: dict[_Connection, None] = {}  # the longest first
        self._with_small_call: set[_Connection] = set()
        self._draining = False
        event_loop.on_tick = self._check_patience

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    def add(self, sock: socket.socket, client: str) -> None:
        """Takes a new connection."""
        if self._draining or not self._has_room():
            sock.close()
            return
        try:
            http2.set_timeout(sock, _STALL_TIMEOUT_S)
            connection = _Connection(sock, client, self._calls)
        except OSError:
            sock.close()
            return
        self._all.add(connection)
        self._take_back(connection, is_sound=True)

    def drain(self) -> None:
        """Takes no more calls; connections end with the call that they have."""
        self._draining = True
        for connection in list(self._idle):
            self._close(connection)
        if not self._all:
            self.ended.set()

    def renew(self) -> None:
        """Ends TLS connections, with the calls that they have, so that their clients show their certificates again."""
        for connection in list(self._all):
            connection.is_outdated = isinstance(connection.sock, http2.TlsSocket)
            if connection.is_outdated and connection in self._idle:
                self._close(connection)

    def hang_up(self) -> None:
        """Ends every connection."""
        for connection in self._all:
            hang_up(connection.sock)

    def _has_room(self) -> bool:
        """Whether there is room for a connection, be it by closing one that is idle."""
        if len(self._all) < _MAX_CONNECTIONS:
            return True
        self._metrics.refused_connection("full")
        if self._idle:
            never_called = (connection for connection in self._idle if not connection.http.last_stream_id)
            self._close(next(never_called, next(iter(self._idle))))
        return len(self._all) < _MAX_CONNECTIONS

    def _rest(self, connection: _Connection) -> None:
        """Has a connection wait for its next call."""
        if connection.http.outbound:  # more than the socket took at once
            self._lend(connection, partial(connection.answers.flush, connection.http))
        elif self._draining or connection.is_outdated:
            self._close(connection)
        else:
            self._idle[connection] = None
            self._watch(connection)
            if connection.http.has_pending_input:
                self._event_loop.call_soon(partial(self._hear, connection))

    def _watch(self, connection: _Connection) -> None:
        if not connection.is_watched:
            connection.is_watched = True
            self._event_loop.add_reader(connection.fd, partial(self._hear, connection))

    def _forget(self, connection: _Connection) -> None:
        if connection.is_watched:
            connection.is_watched = False
            self._event_loop.remove_reader(connection.fd)

    def _hear(self, connection: _Connection) -> None:
        """Acts on what a client has sent."""
        if not connection.is_watched:  # any longer
            return
        http = connection.http
        try:
            call = http.accept_nonblocking()
            if connection.small_call is not None:
                self._hear_beside(connection, connection.small_call)
            elif call is not None:
                del self._idle[connection]
                self._begin(connection, call)
            elif http.has_pending_input and http.needs_blocking_read:
                self._lend(connection, partial(connection.answers.answer_begun, http))
            else:
                http.flush()
                if http.outbound:
                    self._lend(connection, partial(connection.answers.flush, http))
        except Exception as error:
            self._fail(connection, error)

    def _hear_beside(self, connection: _Connection, small_call: InlineCall) -> None:
        if small_call.call.failure is not None:
            self._forget_call(connection)
            small_call.abandon(self._calls.batcher)
            small_call.call.end()
            self._rest(connection)
        elif connection.http.has_pending_input:
            self._forget(connection)  # until the call has ended: there is no room for more, perhaps
        else:
            connection.http.flush()

    def _begin(self, connection: _Connection, call: http2.ServerCall) -> None:
        if call.failure is not None:  # it was reset before we saw it: few who mean well do that, and not often
            connection.http.count_idle_frame(_WEIGHT_OF_RESET)
            call.end()
            self._rest(connection)
            return
        try:
            caller = connection.answers.caller(call, lambda: call.failure is not None)
            if call.path not in UNARY or not call.is_fully_received:
                self._lend(connection, partial(connection.answers.answer, call))
                return
            small_call = InlineCall(call, caller)
            end = partial(self._event_loop.call_soon, partial(self._end, connection, small_call))
            data = connection.answers.message_of(call, caller)
            has_begun = small_call.submit(self._calls, data, end)
        except Exception as error:
            refuse(call, error)
            self._rest(connection)
            return
        if has_begun:
            connection.small_call = small_call
            self._with_small_call.add(connection)
        else:
            self._lend(connection, partial(connection.answers.answer_message, call, data, caller))

    def _end(self, connection: _Connection, small_call: InlineCall) -> None:
        """Answers a small call that has been computed, or never will be."""
        staged = small_call.staged
        if small_call.is_over:
            staged.close()
            return
        self._forget_call(connection)
        reason = None
        try:
            try:
                was_sent = small_call.send()
            except Exception as error:
                reason, was_sent = error, True
                refuse(small_call.call, error)
        except Exception as error:
            staged.close(error)
            self._fail(connection, error)
            return
        if was_sent:
            staged.close(reason)
            self._rest(connection)
        elif not self._lend(connection, partial(connection.answers.send, small_call.call, staged, small_call.caller)):
            staged.close()

    def _forget_call(self, connection: _Connection) -> None:
        connection.small_call = None
        self._with_small_call.remove(connection)

    def _check_patience(self) -> None:
        """Answers calls whose deadline has passed."""
        for connection in list(self._with_small_call):
            small_call = connection.small_call
            assert small_call is not None
            try:
                small_call.check_patience(self._calls.batcher)
            except (TimeoutError, CancelledError) as error:
                self._forget_call(connection)
                try:
                    refuse(small_call.call, error)
                    self._rest(connection)
                except Exception as broken:
                    self._fail(connection, broken)

    def _lend(self, connection: _Connection, action: Callable[[], None]) -> bool:
        """Lends a connection to a thread, for something that may wait; closes it if there is none, and says so."""
        self._idle.pop(connection, None)
        self._forget(connection)
        connection.http.blocking = True
        try:
            self.threads.submit(partial(self._act, connection, action))
        except RuntimeError as error:  # of the system, which has no more
            self._fail(connection, error)
            return False
        return True

    def _act(self, connection: _Connection, action: Callable[[], None]) -> None:
        """Runs in a thread."""
        is_sound = False
        try:
            action()
            is_sound = True
        except Exception as error:
            self._note(error)
        finally:
            self._event_loop.call_soon(partial(self._take_back, connection, is_sound=is_sound))

    def _take_back(self, connection: _Connection, *, is_sound: bool) -> None:
        if is_sound:
            connection.http.blocking = False
            self._rest(connection)
        else:
            self._close(connection)

    def _fail(self, connection: _Connection, error: Exception) -> None:
        self._note(error)
        self._close(connection)

    def _note(self, error: Exception) -> None:
        """Takes note of why a connection ends."""
        if isinstance(error, http2.ProtocolError):
            self._metrics.refused_connection("protocol")
        if isinstance(error, (ConnectionError, TimeoutError)):
            logger.debug("a connection ended: %s", error)
        else:
            logger.error("a connection failed", exc_info=error)

    def _close(self, connection: _Connection) -> None:
        self._forget(connection)
        if (small_call := connection.small_call) is not None:
            self._forget_call(connection)
            small_call.abandon(self._calls.batcher)
        connection.http.close()
        self._idle.pop(connection, None)
        self._all.discard(connection)
        if self._draining and not self._all:
            self.ended.set()
