"""Which connections the event loop reads from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

from bngrad_server.rpc.http2.connection import Connection
from bngrad_server.rpc.http2.limits.waste import Paused
from bngrad_server.runtime.event_loop import EventLoop

_FRAME_TIMEOUT_S = 5.0
"""How long a frame or header block may take to arrive while no thread reads it."""


class Readers:
    """The connections that are read from; for the event loop's thread.

    Attributes:
        paused: Those that are not, as they have cost too much time for nothing.
        amid_frame: Those that have sent a part of a frame, and since when.
    """

    def __init__(
        self,
        event_loop: EventLoop,
        on_readable: Callable[[Connection], None],
        on_end: Callable[[Connection], None],
        *,
        has_long_calls: bool,
    ) -> None:
        """Reads from none yet; calls ``on_end`` with a paused connection whose client has closed it.

        For the other arguments see `bngrad_server.rpc.http2.connections.Http2Connections`.
        """
        self.paused: Paused[Connection] = Paused()
        self.amid_frame: dict[Connection, float] = {}
        self._read_soon: set[Connection] = set()
        self._event_loop = event_loop
        self._on_readable = on_readable
        self._on_end = on_end
        self._has_long_calls = has_long_calls

    def watch(self, connection: Connection) -> None:
        """Reads from a connection, unless it is paused; expects that its next call is as large as the last one.

        Raises:
            OSError: The system has no memory for it, or watches as many descriptors as it may.
        """
        if connection in self.paused:
            self._watch_end(connection)
            return
        self._add(connection)
        if self._has_long_calls and connection.http.expects_large_call:
            self._event_loop.expect_long(connection.fd, connection.client)
        else:
            self._event_loop.expect_brief(connection.fd)

    def watch_lanes(self, connection: Connection) -> None:
        """Reads from a connection with several calls, or writes to it, as far as that makes sense now.

        Raises:
            OSError: See `watch`.
        """
        interest = is_reading, is_cut = connection.http.is_reading, connection.http.is_cut
        if connection in self.paused:
            self._watch_end(connection)
            return
        if not (is_reading or is_cut):
            self.unwatch(connection)
            return
        was_watched = connection.is_watched
        self._add(connection)
        if not was_watched or connection.interest != interest:
            connection.interest = interest
            self._event_loop.expect(connection.fd, readable=is_reading, writable=is_cut)
        if is_reading:
            self.note_partial_frame(connection)
            if connection.http.has_pending_input:
                self.read_soon(connection)
        else:
            self.amid_frame.pop(connection, None)

    def _add(self, connection: Connection) -> None:
        if not connection.is_watched:
            self.unwatch(connection)
            self._event_loop.add_reader(connection.fd, partial(self._on_event, connection))
            connection.is_watched = True

    def _watch_end(self, connection: Connection) -> None:
        """Waits for the end of a paused connection: nothing reads what its client has left unread."""
        if not connection.is_end_watched:
            self.unwatch(connection)
            with contextlib.suppress(OSError):  # no memory: its end is seen when it is resumed
                self._event_loop.await_end(connection.fd, partial(self._on_end_event, connection))
                connection.is_end_watched = True

    def _on_event(self, connection: Connection) -> None:
        if connection not in self._read_soon:  # else it has its turn in this round, like all others
            self._on_readable(connection)

    def _on_end_event(self, connection: Connection) -> None:
        self.unwatch(connection)
        self._on_end(connection)

    def unwatch(self, connection: Connection) -> None:
        """Reads no longer from a connection: what its client sends waits in the kernel."""
        if connection.is_watched or connection.is_end_watched:
            connection.is_watched = connection.is_end_watched = False
            self._event_loop.remove_reader(connection.fd)

    def read_soon(self, connection: Connection) -> None:
        """Reads from a connection, once, when others had their turn."""
        if connection not in self._read_soon:
            self._event_loop.call_soon(partial(self._read_now, connection))  # first, as there may be no memory for it
            self._read_soon.add(connection)

    def _read_now(self, connection: Connection) -> None:
        self._read_soon.discard(connection)
        self._on_readable(connection)

    def note_partial_frame(self, connection: Connection) -> None:
        """Notes whether a connection has sent a part of a frame; to be called when no input is pending."""
        if connection.http.is_amid_frame:
            self.amid_frame.setdefault(connection, time.monotonic())
        else:
            self.amid_frame.pop(connection, None)

    def excuse(self, pause_s: float) -> None:
        """Gives clients a time again in which this process did nothing."""
        for connection in self.amid_frame:
            self.amid_frame[connection] += pause_s

    def overdue(self, is_read_here: Callable[[Connection], bool]) -> Iterator[Connection]:
        """Reads again what was put off, and yields the connections whose frames do not end in time.

        Args:
            is_read_here: Whether no thread reads from a connection: threads have limits of their own.
        """
        now = time.monotonic()
        for connection, since in list(self.amid_frame.items()):
            if connection.http.awaits_rest:
                self._on_readable(connection)
            elif not is_read_here(connection):
                del self.amid_frame[connection]
            elif now - since > _FRAME_TIMEOUT_S:
                yield connection

    def pause(self, connection: Connection) -> None:
        """Pauses a connection until it may have some time."""
        self.paused.add(connection)
        self._watch_end(connection)

    def suspend(self, connection: Connection, delay_s: float) -> None:
        """Pauses a connection for a time."""
        self.paused.suspend(connection, delay_s)
        self._watch_end(connection)

    def forget(self, connection: Connection) -> None:
        """Forgets a connection."""
        self.unwatch(connection)
        self.paused.discard(connection)
        self.amid_frame.pop(connection, None)
