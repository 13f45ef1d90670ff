"""What both ends of a connection know of it, and the control frames that change that (RFC 9113)."""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from typing import ClassVar, NoReturn

from bngrad_wire.http2 import frames
from bngrad_wire.http2.carrier import Carrier
from bngrad_wire.http2.errors import (
    ErrorCode,
    PeerGoneError,
    ProtocolError,
    RpcError,
    Status,
    error_name,
    error_of_reset,
)
from bngrad_wire.http2.sockets.buffered_socket import BufferedSocket
from bngrad_wire.http2.stream import Stream

WINDOW_UPDATE_NBYTES = 2**28
"""The window of the peer is restored in steps of at least this."""
EARNING_SHIFT = 8
"""DATA of a running call, in either direction, earns a frame for each 256 bytes; headers and SETTINGS cost one."""
_FRAMES_PER_SECOND = 2000
"""What a peer may send that moves no call forward. A frame costs one, and what it brings earns some back, up to this
number."""
_FRAMES_OF_DISTRUSTED = 100
"""The same, see `ConnectionState.distrust`."""
_MAX_CLOSED_EARLY = 256
"""Streams that this end closed first, whose late frames are still expected."""
_DEFAULT_TABLE_NBYTES = 4096
_TABLE_SIZE_ZERO = b"\x20"
"""Sets the dynamic table of the encoder, which is never used, to size zero (RFC 7541, section 6.3)."""

_PAYLOAD_NBYTES = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_CONNECTION_FRAMES = {frames.SETTINGS, frames.PING, frames.GOAWAY}
_STREAM_FRAMES = {frames.PRIORITY, frames.RST_STREAM}


class ConnectionState(Carrier):
    """The windows, settings and streams of a connection, and what its peer may still send.

    Attributes:
        last_stream_id: The greatest number of a stream that was opened.
        going_away: The peer sent GOAWAY.
        settings_received: The peer's first SETTINGS have arrived.
        frame_budget: How many frames the peer may still send before it is asked how fast they came.
    """

    io: BufferedSocket
    _frames_per_reset: ClassVar[int]
    """What the reset of a running call costs the peer that caused it, above the frame itself."""

    def __init__(self, sock: socket.socket) -> None:
        self.io = BufferedSocket(sock)
        self.stream = None
        self.last_stream_id = 0
        self.going_away = False
        self.outbound = []
        self.blocking = True
        self.data_left = 0
        self.settings_received = False
        self.send_window = frames.DEFAULT_WINDOW
        self.initial_send_window = frames.DEFAULT_WINDOW
        self.max_frame_size = frames.MIN_FRAME_SIZE
        self.table_size_update = self.unanswered_ping = b""
        self.frame_budget = self._frames_per_second = _FRAMES_PER_SECOND
        self._budget_at = time.monotonic()
        self._closed_early: dict[int, None] = {}
        self._receive_window = frames.MAX_WINDOW
        self._is_frame_cut = False  # of what was sent last
        self._unacknowledged = 0
        self._pings = 0

    @property
    @abstractmethod
    def last_peer_stream_id(self) -> int:
        """The greatest number of a stream that the peer has opened, which GOAWAY names."""

    @abstractmethod
    def goaway_ends_call(self, last_stream_id: int) -> bool:
        """Returns whether the peer's GOAWAY, which names the last stream that it handles, ends the running call."""

    def close(self) -> None:
        """Closes the socket, after a last GOAWAY where that can be sent without waiting (RFC 9113, section 6.8).

        A running call is lost.
        """
        self._close_socket(ErrorCode.NO_ERROR)
        self.stream = None  # The two refer to each other, and would live until garbage is collected.

    def connection_error(self, code: ErrorCode, reason: str) -> NoReturn:
        """Closes the connection because the peer broke the protocol (RFC 9113, section 5.4.1).

        Raises:
            ProtocolError: Always.
        """
        self._close_socket(code, reason)
        self.io.broken = reason
        raise ProtocolError(reason)

    def _close_socket(self, code: ErrorCode, reason: str = "") -> None:
        goaway = frames.goaway(self.last_peer_stream_id, code, reason)
        self.io.close(b"" if self._is_frame_cut else goaway)  # amid another frame, the peer would take it for content

    def stream_error(self, stream: Stream, code: ErrorCode, reason: str) -> None:
        """Resets a stream because the peer broke the protocol on it alone (RFC 9113, section 5.4.2)."""
        self.send_control(frames.rst_stream(stream.id, code))
        if stream.failure is None:
            stream.failure = RpcError(Status.INTERNAL, reason)
        self._end_by_reset(stream)

    def send_control(self, frame: bytes) -> None:
        """Appends a frame that responds to one of the peer's to `outbound`, and sends all of that if `blocking`."""
        self.outbound.append(frame)
        if self.blocking:
            self.io.check()
            try:
                self.flush()
            except PeerGoneError:
                self.io.broken = None  # what the peer sent before it closed, such as an answer, can still be read

    def ping(self) -> None:
        """See `Carrier`."""
        self._pings += 1
        self.unanswered_ping = self._pings.to_bytes(_PAYLOAD_NBYTES[frames.PING], "big")
        self.outbound.append(frames.frame(frames.PING, 0, 0, self.unanswered_ping))
        self.flush()

    def flush(self) -> None:
        """See `Carrier`."""
        if self.outbound:
            pieces, self.outbound = self.outbound, []
            rest = self.io.send(pieces, blocking=self.blocking)
            self._is_frame_cut = bool(rest)
            if rest:
                self.outbound.append(rest)

    def expect_late_frames(self, stream_id: int) -> None:
        """Expects late frames of a stream that this end closed before the peer did."""
        self._closed_early[stream_id] = None
        if len(self._closed_early) > _MAX_CLOSED_EARLY:
            del self._closed_early[next(iter(self._closed_early))]

    def acknowledge_received_data(self, nbytes: int, stream: Stream | None) -> None:
        """See `Carrier`."""
        self._unacknowledged += nbytes
        if self._unacknowledged >= WINDOW_UPDATE_NBYTES:
            self.send_control(frames.window_update(0, self._unacknowledged))
            self._receive_window += self._unacknowledged
            self._unacknowledged = 0
        if stream is not None:
            stream.unacknowledged += nbytes
            if stream.unacknowledged >= WINDOW_UPDATE_NBYTES and not (stream.peer_ended or stream.reset):
                self.send_control(frames.window_update(stream.id, stream.unacknowledged))
                stream.receive_window += stream.unacknowledged
                stream.unacknowledged = 0

    def charge(self, frame_count: int) -> None:
        """Takes frames off the peer's budget; closes the connection of a peer that floods it."""
        self.frame_budget -= frame_count
        if self.frame_budget < 0:
            now = time.monotonic()
            per_second = self._frames_per_second
            self.frame_budget += min(int((now - self._budget_at) * per_second), per_second)
            self._budget_at = now
            if self.frame_budget < 0:
                reason = f"more than {per_second} frames within a second moved no call forward"
                self.connection_error(ErrorCode.ENHANCE_YOUR_CALM, reason)

    def earn(self, nbytes: int, shift: int = EARNING_SHIFT) -> None:
        """See `Carrier`."""
        self.frame_budget = min(self.frame_budget + (nbytes >> shift), self._frames_per_second)

    def distrust(self) -> None:
        """Allows fewer frames from now on to a peer that has flooded other connections."""
        self._frames_per_second = _FRAMES_OF_DISTRUSTED
        self.frame_budget = min(self.frame_budget, _FRAMES_OF_DISTRUSTED)

    def known_stream(self, stream_id: int) -> Stream | None:
        """Returns an open stream; None for any other."""
        return self.stream if self.stream is not None and self.stream.id == stream_id else None

    def active_stream(self, stream_id: int, frame_name: str) -> Stream | None:
        """Returns an open stream; None for a closed one. Others are an error."""
        if (stream := self.known_stream(stream_id)) is not None:
            return stream
        if stream_id % 2 == 0 or stream_id > self.last_stream_id:
            reason = f"{frame_name} on stream {stream_id}, which was never opened"
            self.connection_error(ErrorCode.PROTOCOL_ERROR, reason)
        return None

    def _check_dependency(self, stream_id: int, field: bytes) -> None:
        if len(field) == frames.UINT32.size and frames.UINT32.unpack(field)[0] & frames.MAX_STREAM_ID == stream_id:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"stream {stream_id} depends on itself")

    def _handle_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handles a frame other than DATA and HEADERS."""
        if (size := _PAYLOAD_NBYTES.get(kind)) is not None and len(payload) != size:
            reason = f"a frame of type {kind} has {len(payload)} bytes, not {size}"
            self.connection_error(ErrorCode.FRAME_SIZE_ERROR, reason)
        if (kind in _CONNECTION_FRAMES and stream_id) or (kind in _STREAM_FRAMES and not stream_id):
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} came on stream {stream_id}")
        if kind == frames.WINDOW_UPDATE:
            self._handle_window_update(stream_id, frames.UINT32.unpack(payload)[0] & frames.MAX_WINDOW)
        elif kind == frames.SETTINGS:
            self._handle_settings(flags, payload)
        elif kind == frames.PING:
            if not flags & frames.ACK:
                self.send_control(frames.frame(frames.PING, frames.ACK, 0, payload))
            elif payload == self.unanswered_ping:
                self.unanswered_ping = b""
        elif kind == frames.RST_STREAM:
            self._handle_rst_stream(stream_id, frames.UINT32.unpack(payload)[0])
        elif kind == frames.GOAWAY:
            self._handle_goaway(payload)
        elif kind == frames.PRIORITY:
            self._check_dependency(stream_id, payload[:4])
        else:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} came where none may")

    def _handle_window_update(self, stream_id: int, increment: int) -> None:
        if not increment:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE by 0 on stream {stream_id}")
        if not stream_id:
            self.send_window += increment
            if self.send_window > frames.MAX_WINDOW:
                reason = "WINDOW_UPDATE makes the connection's window too large"
                self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, reason)
        elif (stream := self.active_stream(stream_id, "WINDOW_UPDATE")) is not None:
            stream.send_window += increment
            if stream.send_window > frames.MAX_WINDOW:
                reason = f"WINDOW_UPDATE makes the window of stream {stream_id} too large"
                self.stream_error(stream, ErrorCode.FLOW_CONTROL_ERROR, reason)
        if self.stream is not None:
            self.stream.progressed()

    def _handle_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                self.connection_error(ErrorCode.FRAME_SIZE_ERROR, "the acknowledgement of SETTINGS has a payload")
            return
        if len(payload) % frames.SETTING.size:
            self.connection_error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        if cost := len(payload) >> EARNING_SHIFT:
            self.charge(cost)
        initial_window = None
        for key, value in frames.SETTING.iter_unpack(payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                initial_window = value  # the last one counts: each takes time for every stream
            elif key == frames.MAX_FRAME_SIZE:
                if not frames.MIN_FRAME_SIZE <= value <= frames.LARGEST_FRAME_SIZE:
                    self.connection_error(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
                self.max_frame_size = value
            elif key == frames.ENABLE_PUSH and value > 1:
                self.connection_error(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}")
            elif key == frames.HEADER_TABLE_SIZE and value < _DEFAULT_TABLE_NBYTES:
                self.table_size_update = _TABLE_SIZE_ZERO
        if initial_window is not None:
            self._set_initial_send_window(initial_window)
        self.settings_received = True
        self.send_control(frames.frame(frames.SETTINGS, frames.ACK, 0, b""))

    def _set_initial_send_window(self, value: int) -> None:
        if value > frames.MAX_WINDOW:
            self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")
        if self.stream is not None:
            self.stream.send_window += value - self.initial_send_window
            if self.stream.send_window > frames.MAX_WINDOW:
                self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS makes a stream's window too large")
            self.stream.progressed()
        self.initial_send_window = value

    def _handle_rst_stream(self, stream_id: int, code: int) -> None:
        stream = self.active_stream(stream_id, "RST_STREAM")
        if stream is None:
            self._closed_early.pop(stream_id, None)
            return
        stream.peer_ended = True
        stream.failure = stream.failure or error_of_reset(code)
        self._end_by_reset(stream)

    def _end_by_reset(self, stream: Stream) -> None:
        self.charge(self._frames_per_reset)
        stream.ended = stream.reset = True
        self.acknowledge_received_data(len(stream.receive_buffer), None)
        stream.receive_buffer = bytearray()
        stream.progressed()

    def _handle_goaway(self, payload: bytes) -> None:
        if len(payload) < 8:
            self.connection_error(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        last, code = (frames.UINT32.unpack_from(payload, offset)[0] for offset in (0, 4))
        self.going_away = True
        if self.goaway_ends_call(last & frames.MAX_STREAM_ID):
            reason = payload[8:].decode(errors="replace")
            raise PeerGoneError(f"the peer gave the connection up with GOAWAY, {error_name(code)} {reason}".rstrip())
