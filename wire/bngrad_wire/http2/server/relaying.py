"""A connection that relays what its lanes send, as far as the client takes it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.server.call import WHOLE_NBYTES
from bngrad_wire.http2.server.connection import ServerConnection
from bngrad_wire.http2.server.lane import Lane
from bngrad_wire.http2.server.lane_interfaces import Loop
from bngrad_wire.http2.server.outbound import Batch, KeptAnswers, OutboundQueue, Part
from bngrad_wire.http2.server.relay import Relay, Uploads
from bngrad_wire.http2.stream import Stream

WINDOW_NBYTES = WHOLE_NBYTES
"""How much of a call is received before its owner reads it."""
LARGE_WINDOW_NBYTES = 2**20
"""By how much the window of any other large message grows once its owner reads it."""
MAX_ENLARGED = 1
"""For how many calls at a time."""
_LARGE_STEP_NBYTES = 2**18
"""In which steps such a window is restored."""
_SENT_NBYTES = 2**18
"""About how much is sent with one system call."""
_TURN_NBYTES = 2**16
"""How much DATA of a stream is sent before others have their turn."""


class RelayingConnection(ServerConnection):
    """Sends what lanes give it; `DeliveringConnection` delivers what belongs to their calls.

    Attributes:
        is_corked: Whether what lanes send waits for `flush`.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.is_corked = False
        self._moved_nbytes = 0  # of DATA of running calls, until the end of the next `MultiplexedConnection.read`
        self._loop: Loop | None = None
        self._uploads = Uploads(0, 0)
        self._on_change: Callable[[], None] = lambda: None
        self._streams: dict[int, Stream] = {}
        self._enlarged: set[int] = set()  # the streams with large windows
        self._news: list[int] = []  # the streams of lanes that have some
        self._queue = OutboundQueue(KeptAnswers(0))
        self._sending: list[Part] = []
        self._cut_frame = b""  # the rest of what the socket did not take

    @property
    def is_multiplexed(self) -> bool:
        """Whether it carries several calls at a time."""
        return self._loop is not None

    @property
    def is_cut(self) -> bool:
        """Whether the socket did not take all that it was given: the rest waits until it is writable."""
        return bool(self._cut_frame)

    @property
    def has_unsent(self) -> bool:
        """Whether something waits until the client takes it."""
        return bool(self._cut_frame or self.outbound or self._queue)

    @property
    def unsent_nbytes(self) -> int:
        """How much waits until the client takes it, and will not be sent otherwise."""
        return len(self._cut_frame) + self._queue.kept_nbytes

    def close(self) -> None:
        """See `ConnectionState`; ends the waits of all lanes."""
        super().close()
        self._lose_lanes()
        for stream in self._streams.values():
            if isinstance(stream, Relay):
                self._uploads.leave(stream)
        self._streams.clear()
        self._queue.clear()

    def _lose_lanes(self) -> None:
        for lane in self._lanes():
            lane.lose(self.io.broken or "it was closed")

    def _lanes(self) -> Iterator[Lane]:
        return (stream.lane for stream in self._streams.values() if isinstance(stream, Relay))

    def send_room_of(self, stream_id: int) -> int:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`."""
        stream = self._streams.get(stream_id)
        if self._cut_frame or stream is None:
            return 0
        return min(
            self.send_window - self._queue.data_nbytes, stream.send_window - self._queue.data_nbytes_of(stream_id)
        )

    @property
    def room_to_keep(self) -> int:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`."""
        return self._queue.room_to_keep

    def has_news(self, stream_id: int) -> None:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`."""
        self._news.append(stream_id)

    def send_batch(self, batch: Batch) -> None:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`."""
        stream = self._streams.get(batch.stream_id)
        if stream is None or stream.reset:
            batch.drop()
        elif self.io.broken is None:
            self._queue.add(batch)
            self._flush_for_lanes()

    def withdraw(self, stream_id: int) -> None:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`."""
        self._queue.withdraw(stream_id)

    def consume(self, stream_id: int, nbytes: int, *, is_large: bool) -> None:
        """See `bngrad_wire.http2.server.lane_interfaces.Lanes`; allows the client to send as much again.

        It goes on to read what was left in the socket, where too much was unread, also if the client has sent all of
        the call: it may have sent what the answer waits for.
        """
        stream = self._streams.get(stream_id)
        if not isinstance(stream, Relay):
            return
        if not stream.peer_ended:
            if is_large and stream_id not in self._enlarged and len(self._enlarged) < MAX_ENLARGED:
                self._enlarged.add(stream_id)
                stream.lane.step_nbytes = _LARGE_STEP_NBYTES
                nbytes += LARGE_WINDOW_NBYTES
            if stream_id in self._enlarged:
                self.io.enlarge()
            self._open_window(stream, nbytes)
        self._on_change()

    def _open_window(self, relay: Relay, nbytes: int) -> None:
        """Allows the client to send more of a call."""
        relay.receive_window += nbytes
        self.outbound.append(frames.window_update(relay.id, nbytes))
        self._flush_for_lanes()

    def _flush_for_lanes(self) -> None:
        if self.is_corked:
            return
        try:
            self.flush()
        except Exception as error:  # the next `read` says so
            self.io.broken = self.io.broken or f"sending failed: {error or type(error).__name__}"
            self._lose_lanes()
        if self.is_cut:
            self._on_change()

    def flush(self) -> None:
        """See `Carrier`; after `multiplex`, sends what the socket takes."""
        if not self.is_multiplexed:
            super().flush()
            return
        while pieces := self._next_pieces():
            self._cut_frame = self.io.send(pieces, blocking=False)
            self._is_frame_cut = bool(self._cut_frame)
            sent, self._sending = self._sending, []
            for part in sent:
                part.was_sent()
            if self._cut_frame:
                return

    def _next_pieces(self) -> list[Buffer]:
        """Takes what is to be sent next: no piece is needed after the next call of `BufferedSocket.send`."""
        if self._cut_frame:
            return [self._cut_frame]
        pieces, self.outbound = self.outbound, []
        nbytes = 0
        while nbytes < _SENT_NBYTES and (stream_id := self._queue.next_turn()) is not None:
            part = self._next_part(stream_id, self._streams.get(stream_id))
            if part is not None:
                pieces += part.pieces
                nbytes += part.data_nbytes
                self._sending.append(part)
        return pieces

    def _next_part(self, stream_id: int, stream: Stream | None) -> Part | None:
        """Takes what a stream is to send next and windows have room for; of a call that has ended, all has room."""
        room = min(self.send_window, _TURN_NBYTES)
        if stream is not None:
            room = min(room, stream.send_window)
        part = self._queue.take(stream_id, room, self.max_frame_size)
        if part is not None:
            self.send_window -= part.data_nbytes
            self._moved_nbytes += part.data_nbytes
            if stream is not None:
                stream.send_window -= part.data_nbytes
                if part.ends_stream and isinstance(stream, Relay):
                    stream.is_answered = True
        return part

    def charge(self, frame_count: int) -> None:
        """See `ConnectionState`."""
        if self.frame_budget < frame_count:
            for lane in self._lanes():
                self.earn(lane.take_earned(), 0)
        super().charge(frame_count)

    def _handle_window_update(self, stream_id: int, increment: int) -> None:
        super()._handle_window_update(stream_id, increment)
        self._queue.window_opened(stream_id)
        for stream in [self._streams.get(stream_id)] if stream_id else list(self._streams.values()):
            self._window_opened(stream)

    def _window_opened(self, stream: Stream | None) -> None:
        if stream is not None and not isinstance(stream, Relay):  # lanes do not look at windows
            stream.progressed()

    def _set_initial_send_window(self, value: int) -> None:
        change = value - self.initial_send_window
        super()._set_initial_send_window(value)
        for stream in list(self._streams.values()):
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW:
                self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS makes a stream's window too large")
            self._window_opened(stream)
        self._queue.window_opened(0)
