"""The server end of a connection that may carry several calls at a time, each on a lane."""

from __future__ import annotations

import socket
from collections.abc import Callable

from bngrad_wire.http2 import frames
from bngrad_wire.http2.block_decoder import HeaderBlock
from bngrad_wire.http2.connection import FRAMES_PER_TURN
from bngrad_wire.http2.connection_state import EARNING_SHIFT
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.server.call import ServerCall
from bngrad_wire.http2.server.delivering import DeliveringConnection
from bngrad_wire.http2.server.lane import Lane
from bngrad_wire.http2.server.lane_interfaces import Loop
from bngrad_wire.http2.server.outbound import KeptAnswers, OutboundQueue
from bngrad_wire.http2.server.relay import Relay, Uploads, is_open
from bngrad_wire.http2.server.relaying import LARGE_WINDOW_NBYTES, MAX_ENLARGED, WINDOW_NBYTES
from bngrad_wire.http2.server.request_headers import CallHeaders
from bngrad_wire.http2.stream import Stream

_CALLS = 100
"""How many calls a client may make at a time; it is told so."""
_MAX_STREAMS = 2 * _CALLS
"""How many there may be with those that have ended for the client, and not been forgotten here yet."""
_CALLS_PER_TURN = 8
"""How many calls may begin before others get their turn."""
_MAX_UNREAD_NBYTES = MAX_ENLARGED * LARGE_WINDOW_NBYTES
"""How much all calls together may have unread above what each one may; beyond, nothing is received.

That may take what others wait for, so only a call that began when its window was larger gets there.
"""
_MAX_KEPT_NBYTES = 2**18
"""While more is kept for a client that does not read, nothing is received."""
_TOO_MANY_NBYTES = 8 * 2**20
"""How much is kept at most: a client that leaves this much unread, and still sends, is closed."""
_LAST_PING = b"goodbye?"
"""What the client answers once it knows that it may begin no more calls."""
_SETTINGS = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: _CALLS,
        frames.INITIAL_WINDOW_SIZE: WINDOW_NBYTES,
        frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME_SIZE,
    }
)


class MultiplexedConnection(DeliveringConnection):
    """A connection that accepts calls one after the other or, after `multiplex`, several at a time.

    After `multiplex`, all methods are for the thread of the event loop, which must not wait: `read` takes the place of
    `accept_nonblocking`.

    Attributes:
        was_useful: Whether DATA of running calls, in either direction, was worth the frames of the last `read`.
        has_handled: Whether the last `read` handled a whole frame.
        may_multiplex: Whether `multiplex` may still be called.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.was_useful = self.has_handled = False
        self.may_multiplex = True
        self._wait_s = 0.0
        self._most_unread_nbytes = 0  # above what each call may have; it may be less
        self._begun: list[tuple[Lane, ServerCall]] = []
        self._failed: dict[int, None] = {}

    def multiplex(
        self, loop: Loop, wait_s: float, uploads: Uploads, answers: KeptAnswers, on_change: Callable[[], None]
    ) -> Lane:
        """Carries several calls at a time from now on, the running one among them.

        Args:
            loop: The event loop.
            wait_s: What counts as one of the `waits` of a lane's `Patience`, in seconds.
            uploads: Those of all connections.
            answers: Likewise.
            on_change: Called when `is_reading` or `is_cut` may have changed by what a lane did.

        Returns:
            The lane of the running call.
        """
        call = self.stream
        assert isinstance(call, ServerCall)
        self._loop, self._wait_s, self._uploads, self._on_change = loop, wait_s, uploads, on_change
        self._queue = OutboundQueue(answers)
        self.stream, self.awaits_rest = None, False
        self.max_receive_frame_size = frames.LARGEST_FRAME_SIZE
        self.takes_partial_data = True
        self.send_control(_SETTINGS)
        lane = self._new_lane(call.id)
        relay = Relay(call, lane, (call.send_window, call.receive_window), self._failed)
        relay.has_begun = True
        relay.ended, relay.peer_ended, relay.content_left = call.ended, call.peer_ended, call.content_left
        self._streams[call.id] = relay
        call.move_to(lane)
        call.send_window = lane.initial_send_window
        return lane

    def read(self) -> tuple[list[tuple[Lane, ServerCall]], list[int], list[int]]:
        """Handles some frames that have arrived.

        Returns:
            The calls that they begin, which may have ended already, and the numbers of those that they fail, and of
            those of which they bring more.

        Raises:
            PeerGoneError: The client has closed or reset the connection.
            ProtocolError: The client broke the protocol.
        """
        if self._queue.kept_nbytes > _TOO_MANY_NBYTES:
            reason = f"the client left {_TOO_MANY_NBYTES} bytes of answers unread, and sent more"
            self.connection_error(ErrorCode.ENHANCE_YOUR_CALM, reason)
        self.has_handled, budget = False, self.frame_budget
        if not self._has_buffered_input():
            self.io.fill_nonblocking()
        if self._take_preface():
            self.handle_buffered_frames()
            for stream_id in self._failed:
                self._queue.withdraw(stream_id)
            for stream_id in self._news:
                if isinstance(relay := self._streams.get(stream_id), Relay):
                    relay.lane.handle_deliveries()
        moved_nbytes, self._moved_nbytes = self._moved_nbytes, 0
        self._most_unread_nbytes += moved_nbytes
        self.was_useful = moved_nbytes > 0 and self.frame_budget + (moved_nbytes >> EARNING_SHIFT) >= budget
        failed = [stream_id for stream_id in self._failed if stream_id in self._streams]
        found = self._begun.copy(), failed, self._news.copy()
        self._begun.clear()
        self._failed.clear()
        self._news.clear()
        return found

    def announce_goaway(self) -> None:
        """Asks the client to begin no more calls; those that are on their way are accepted, until `goaway`.

        That is due once `knows_goaway` (RFC 9113, section 6.8): at once, it would refuse what the client sends until it
        hears of it, and clients do not repeat large calls that were refused.
        """
        self.send_control(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR))
        self.unanswered_ping = _LAST_PING  # `ping` would also send, and fail where the client has gone
        self.send_control(frames.frame(frames.PING, 0, 0, _LAST_PING))

    @property
    def knows_goaway(self) -> bool:
        """Whether the client has answered what `announce_goaway` sent, and so begins no more calls."""
        return not self.unanswered_ping

    @property
    def is_reading(self) -> bool:
        """Whether anything is received, as not too much of what came before, or is to be sent, is left."""
        if self._cut_frame and self._queue.kept_nbytes > _MAX_KEPT_NBYTES:
            return False
        if self._most_unread_nbytes > _MAX_UNREAD_NBYTES:
            self._most_unread_nbytes = sum(max(lane.unread - lane.allowed_nbytes, 0) for lane in self._lanes())
        return self._most_unread_nbytes <= _MAX_UNREAD_NBYTES

    def forget(self, lane: Lane, stream_id: int) -> None:
        """Ends a call whose lane has no other owner any longer.

        Resets it if it has no end yet: with ENHANCE_YOUR_CALM, which is RESOURCE_EXHAUSTED to gRPC, if its client was
        too slow.
        """
        was_given_up = lane.stream is not None or lane.io.broken is not None
        if was_given_up:
            self.withdraw(stream_id)
        stream = self._streams.pop(stream_id, None)
        self._queue.window_opened(stream_id)  # of its own, it needs none now
        self._enlarged.discard(stream_id)
        if stream is None:
            return
        if isinstance(stream, Relay):
            self._uploads.leave(stream)
            self._discard_rest(stream)
        self.earn(lane.take_earned(), 0)
        self.io.shrink()
        if was_given_up and not stream.reset:
            code = ErrorCode.INTERNAL_ERROR if lane.io.broken is None else ErrorCode.ENHANCE_YOUR_CALM
            self.outbound.append(frames.rst_stream(stream_id, code))
        if not stream.peer_ended:
            self.expect_late_frames(stream_id)

    def unsent_data_nbytes(self, stream_id: int) -> int:
        """How much DATA of a call's answer was not sent yet."""
        return self._queue.data_nbytes_of(stream_id)

    def take_sent(self) -> list[int]:
        """Returns the streams of which all was sent, or withdrawn, since the last time; some may send more."""
        sent, self._queue.emptied = self._queue.emptied, []
        return sent

    def end_upload(self, stream_id: int) -> None:
        """Takes note that a call, whose answer waits, is no longer in the way of others that arrive."""
        if isinstance(relay := self._streams.get(stream_id), Relay):
            self._uploads.leave(relay)

    def _new_lane(self, stream_id: int) -> Lane:
        assert self._loop is not None
        return Lane(self, self._loop, self._wait_s, stream_id, self.table_size_update)

    @property
    def is_full(self) -> bool:
        """Whether no other call may begin now."""
        if not self.is_multiplexed:
            return super().is_full
        if len(self._streams) < _CALLS:
            return bool(self._streams) and self._uploads.count >= self._uploads.most
        return len(self._streams) >= _MAX_STREAMS or sum(map(is_open, self._streams.values())) >= _CALLS

    def new_call(self, stream_id: int, headers: CallHeaders) -> ServerCall:
        """See `ServerConnection`."""
        if not self.is_multiplexed:
            return super().new_call(stream_id, headers)
        lane = self._new_lane(stream_id)
        call = ServerCall(lane, stream_id, headers)
        lane.stream = call
        self._begun.append((lane, call))
        return call

    def stream_opened(self, stream_id: int, block: HeaderBlock, end: bool) -> None:
        """See `ServerConnection`."""
        super().stream_opened(stream_id, block, end)
        relay = self._streams.get(stream_id)
        if isinstance(relay, Relay) and not (end or self._take_whole(relay)):
            relay.is_upload = True
            self._uploads.count += 1

    def _take_whole(self, relay: Relay) -> bool:
        """Takes all DATA of a call that has just begun, at less cost than frame by frame; returns whether it is there.

        Accounts for its frames all the same.
        """
        io = self.io
        whole = frames.find_data(io.buffer, io.low, io.high, relay.id, self.max_receive_frame_size)
        if relay.content_left is not None or not isinstance(whole, frames.WholeData):
            return False
        data, frame_count, end_at = whole
        if not self.account_for_frames(relay, frame_count, 0, len(data)):
            return False
        io.low = end_at
        self._moved_nbytes += len(data)
        self.acknowledge_received_data(len(data), None)
        relay.ended = relay.peer_ended = True
        relay.lane.take_whole(data)
        return True

    def begin(self, stream: Stream, end: bool) -> Stream:
        """See `ServerConnection`."""
        if not self.is_multiplexed:
            return super().begin(stream, end)
        stream.peer_ended = end
        stream.ended = stream.ended or end
        received = stream
        if isinstance(stream, ServerCall):
            lane, _ = self._begun[-1]
            received = Relay(stream, lane, (self.initial_send_window, WINDOW_NBYTES), self._failed)
            received.ended = received.peer_ended = end
        self._streams[stream.id] = received
        return received

    def known_stream(self, stream_id: int) -> Stream | None:
        """See `ConnectionState`."""
        return self._streams.get(stream_id) if self.is_multiplexed else super().known_stream(stream_id)

    def close_stream(self, stream: Stream) -> None:
        """See `Carrier`; of a lane's call, the lane is closed."""
        if not self.is_multiplexed:
            super().close_stream(stream)
        elif self._streams.pop(stream.id, None) is not None and not stream.peer_ended:
            self.expect_late_frames(stream.id)

    def _wants_more(self) -> bool:
        """Leaves another call for the time after `multiplex`, if that may come."""
        is_early = self.stream is not None and self.may_multiplex
        return super()._wants_more() and not (is_early and self._is_call_next())

    def _is_call_next(self) -> bool:
        io = self.io
        if io.high - io.low < frames.HEADER_NBYTES or self.data_left or self._skip_left:
            return False
        _, kind, _, stream_id = frames.parse_header(io.buffer, io.low)
        return kind == frames.HEADERS and stream_id > self.last_stream_id

    def handle_buffered_frames(self) -> None:
        """See `BaseConnection`."""
        if not self.is_multiplexed:
            super().handle_buffered_frames()
            return
        left = FRAMES_PER_TURN if self.is_reading else 0
        while left > 0 and len(self._begun) < _CALLS_PER_TURN:
            self._deliver_data()
            if self.data_left or not self._is_next_ready():
                return
            self.has_handled = True
            count = self._take_run(left)
            if not count:
                self.handle_frame()
            left -= max(count, 1)
        self._deliver_data()
