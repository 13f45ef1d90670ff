"""The lanes of all connections, each from the beginning of its call until the answer has been sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from bngrad_server.rpc.http2.connection import Connection, Lane
from bngrad_server.rpc.http2.limits.unsent import Unsent
from bngrad_server.rpc.http2.reading import Readers
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_wire import http2

_UPLOADS = 256
"""How many calls may not have arrived whole; beyond, each connection may have one."""
_LARGE_UPLOADS_NBYTES = 2**25
"""How much memory may be taken to receive those whole that are large: up to 4 MB each."""
_KEPT_NBYTES = 2**25
"""How much memory answers may take for which their clients have no room: up to 4 MB for each connection."""


class Lanes:
    """The lanes; for the event loop's thread.

    Attributes:
        uploads: Bounds the calls that have not arrived whole.
        answers: Bounds the answers for which clients have no room.
        unsent: The connections of which something is unsent.
        undelivered: The lanes whose calls have ended, but for the rest of their answers, and until when they may wait.
    """

    def __init__(
        self,
        event_loop: EventLoop,
        readers: Readers,
        is_served: Callable[[Connection], bool],
        on_end: Callable[[Connection], None],
        on_error: Callable[[Connection, Exception], None],
        allowance_s: Callable[[int], float],
    ) -> None:
        """Has no lanes yet.

        Args:
            event_loop: Reads from the connections.
            readers: Those that it reads from.
            is_served: Whether a connection is open, and not about to be closed.
            on_end: Called with a connection after one of its calls has ended.
            on_error: Closes a connection.
            allowance_s: How long a client may take for so many bytes of an answer.
        """
        self.uploads = http2.Uploads(_UPLOADS, _LARGE_UPLOADS_NBYTES)
        self.answers = http2.KeptAnswers(_KEPT_NBYTES)
        self.unsent = Unsent()
        self.undelivered: dict[Lane, float] = {}
        self._event_loop = event_loop
        self._readers = readers
        self._is_served = is_served
        self._on_end = on_end
        self._on_error = on_error
        self._allowance_s = allowance_s

    def multiplex(self, connection: Connection, wait_s: float) -> http2.Lane:
        """Lets a connection make several calls; see `bngrad_wire.http2.MultiplexedConnection.multiplex`."""

        def on_change() -> None:
            if not connection.is_watched or connection.http.is_cut > connection.interest[1]:
                self._event_loop.call_soon(partial(self.settle, connection))

        return connection.http.multiplex(self._event_loop, wait_s, self.uploads, self.answers, on_change)

    def begin(
        self, connection: Connection, carrier: http2.Lane, call: http2.ServerCall, rpc: RpcContext | None
    ) -> Lane:
        """Returns a lane of a connection for a call that has begun, with its context if that has been checked."""
        handler = connection.handler.for_lane(partial(carrier.lose, "the call was given up"), carrier.io)
        lane = Lane(connection, carrier, call.id, handler, rpc and handler.adopted(call, rpc))
        connection.lanes[call.id] = lane
        return lane

    def end(self, lane: Lane) -> None:
        """Ends the call of a lane, at once."""
        connection = lane.connection
        self.undelivered.pop(lane, None)
        connection.handler.saw_malformed |= lane.handler.saw_malformed
        if connection.lanes.pop(lane.stream_id, None) is None:  # the connection has been closed meanwhile
            lane.handler.close()
            lane.lane.release()
            return
        connection.http.forget(lane.lane, lane.stream_id)
        lane.lane.release()
        self._on_end(connection)
        if not connection.http.is_corked:
            self.settle(connection)

    def end_once_delivered(self, lane: Lane) -> None:
        """Ends the call of a lane once its answer has been sent."""
        http = lane.connection.http
        if nbytes := http.unsent_data_nbytes(lane.stream_id):
            http.end_upload(lane.stream_id)
            self.undelivered[lane] = time.monotonic() + self._allowance_s(nbytes)
        else:
            self.end(lane)

    def settle(self, connection: Connection) -> None:
        """Sends what the client of a connection takes, and waits for what is possible next."""
        if not self._is_served(connection):
            return
        try:
            connection.http.flush()
            if sent := connection.http.take_sent():
                self._end_delivered(connection, sent)
                if not self._is_served(connection):
                    return
            self._readers.watch_lanes(connection)
            self.unsent.note(connection)
        except Exception as error:
            self._on_error(connection, error)

    def _end_delivered(self, connection: Connection, streams: list[int]) -> None:
        """Ends the calls on these streams whose answers have been sent, or withdrawn."""
        connection.http.is_corked = True  # they have nothing more to send
        for stream_id in streams:
            lane = connection.lanes.get(stream_id)
            if lane is not None and lane in self.undelivered:
                self.end(lane)
        connection.http.is_corked = False

    def excuse(self, pause_s: float) -> None:
        """See `bngrad_server.rpc.http2.reading.Readers.excuse`."""
        for lane in self.undelivered:
            self.undelivered[lane] += pause_s
        self.unsent.excuse(pause_s)

    def give_up_overdue(self) -> Iterator[Connection]:
        """Ends the calls whose answers are taken too slowly; yields the connections of which nothing is taken."""
        now = time.monotonic()
        for lane in [lane for lane, until in self.undelivered.items() if until <= now]:
            lane.lane.lose("its client is too slow")
            self.end(lane)
        yield from self.unsent.overdue()

    def forget(self, connection: Connection) -> None:
        """Forgets the lanes of a connection."""
        for lane in connection.lanes.values():
            self.undelivered.pop(lane, None)
        connection.lanes.clear()
        self.unsent.discard(connection)
