"""What client and server connections share: reading frames, flow control, control frames (RFC 9113)."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from typing import NoReturn

from hpack import HPACKError

from bngrad_wire.http2 import frames
from bngrad_wire.http2.buffered_socket import BUFFER_NBYTES, BufferedSocket
from bngrad_wire.http2.errors import ErrorCode, PeerGoneError, ProtocolError, RpcError, error_name, error_of_reset
from bngrad_wire.http2.frames import Buffer
from bngrad_wire.http2.header_block import HEADER_LIST_NBYTES, BlockDecoder

WINDOW_UPDATE_NBYTES = 2**28
"""The window of the peer is restored in steps of at least this."""
_MAX_CONTROL_NBYTES = BUFFER_NBYTES // 2
"""The longest payload that is accepted of frames other than DATA."""
_READS_PER_CHECK = 2
"""Reads of the socket by `handle_available_frames`; the second sees the end of a peer that sent something before it."""
_IDLE_FRAMES_PER_SECOND = 2000
"""Frames that move no call forward, before the peer is taken to be flooding."""
_DEFAULT_TABLE_NBYTES = 4096
_TABLE_SIZE_ZERO = b"\x20"
"""Sets the dynamic table of the encoder, which is never used, to size zero (RFC 7541, section 6.3)."""

_PAYLOAD_NBYTES = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_CONNECTION_FRAMES = {frames.SETTINGS, frames.PING, frames.GOAWAY}
_STREAM_FRAMES = {frames.PRIORITY, frames.RST_STREAM}


class Stream(ABC):
    """A stream, as its connection sees it.

    Attributes:
        id: The stream's number.
        send_window: Bytes that the peer accepts on this stream for now; negative after its SETTINGS shrank it.
        receive_window: Bytes that the peer may send on this stream for now.
        unacknowledged: Bytes that were consumed, and not yet added to the peer's window again.
        receive_buffer: DATA that arrived before it was read.
        ended: The peer has ended or reset the stream; there may still be data to read.
        reset: The peer has reset the stream.
        failure: Why the call failed; None while it has not.
    """

    def __init__(self, stream_id: int, send_window: int) -> None:
        self.id = stream_id
        self.send_window = send_window
        self.receive_window = frames.MAX_WINDOW
        self.unacknowledged = 0
        self.receive_buffer = bytearray()
        self.ended = False
        self.reset = False
        self.failure: RpcError | None = None

    @abstractmethod
    def headers_received(self, headers: dict[str, str], end: bool) -> None:
        """Handles a header block of this stream."""


class BaseConnection(ABC):
    """One end of a connection.

    Attributes:
        io: The socket.
        stream: The active stream; None between calls.
        last_stream_id: The greatest number of a stream that was opened.
        going_away: The peer sent GOAWAY.
        data_left: Unread bytes of the active stream's current DATA frame.
        outbound: Frames that `flush` will send.
        blocking: Whether sending waits until the socket has taken everything; if not, the rest stays in `outbound`.
        settings_received: The peer's first SETTINGS have arrived.
        send_window: Bytes that the peer accepts on the connection for now.
        initial_send_window: Bytes that the peer accepts on a new stream.
        max_frame_size: The longest payload that the peer accepts in a frame.
        table_size_update: What the next header block to be sent must begin with.
    """

    def __init__(self, sock: socket.socket, opening: bytes) -> None:
        self.io = BufferedSocket(sock)
        self.stream: Stream | None = None
        self.last_stream_id = 0
        self.going_away = False
        self.data_left = 0
        self.outbound: list[Buffer] = []
        self.blocking = True
        self.settings_received = False
        self.send_window = frames.DEFAULT_WINDOW
        self.initial_send_window = frames.DEFAULT_WINDOW
        self.max_frame_size = frames.MIN_FRAME_SIZE
        self.table_size_update = b""
        self._skip_left = 0  # Padding, and data of closed streams.
        self._receive_window = frames.MAX_WINDOW
        self._unacknowledged = 0
        self._decoder = BlockDecoder()
        self._idle_frames = 0
        self._idle_since = 0.0
        try:
            self.io.send([opening + frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)])
        except BaseException:
            self.io.close()
            raise

    @abstractmethod
    def stream_opened(self, stream_id: int, headers: dict[str, str], end: bool) -> None:
        """Handles the header block that opens a stream."""

    @abstractmethod
    def goaway_ends_call(self, last_stream_id: int) -> bool:
        """Returns whether the peer's GOAWAY, which names the last stream that it handles, ends the running call."""

    def close(self) -> None:
        """Closes the socket, after a last GOAWAY where that can be sent without waiting (RFC 9113, section 6.8).

        A running call is lost.
        """
        self.io.close(frames.goaway(self.last_stream_id, ErrorCode.NO_ERROR))
        self.stream = None  # The two refer to each other, and would live until garbage is collected.

    def connection_error(self, code: ErrorCode, reason: str) -> NoReturn:
        """Closes the connection because the peer broke the protocol (RFC 9113, section 5.4.1).

        Raises:
            ProtocolError: Always.
        """
        self.io.close(frames.goaway(self.last_stream_id, code, reason))
        self.io.broken = reason
        raise ProtocolError(reason)

    def send_control(self, frame: bytes) -> None:
        """Sends a frame that responds to one of the peer's; appends it to `outbound` if not `blocking`."""
        if self.blocking:
            self.io.send([frame])
        else:
            self.outbound.append(frame)

    def flush(self) -> None:
        """Sends `outbound`; if not `blocking`, as much of it as the socket takes."""
        if self.outbound:
            pieces, self.outbound = self.outbound, []
            if rest := self.io.send(pieces, blocking=self.blocking):
                self.outbound.append(rest)

    def close_stream(self, stream: Stream) -> None:
        """Closes a stream on this side; data that is unread, or arrives later, is discarded."""
        if stream is self.stream:
            self.stream = None
            self._skip_left += self.data_left
            unread = self.data_left + len(stream.receive_buffer)
            self.data_left = 0
            self.acknowledge_received_data(unread, None)

    def acknowledge_received_data(self, nbytes: int, stream: Stream | None) -> None:
        """Counts DATA bytes as consumed, and restores the peer's window from time to time (RFC 9113, section 5.2)."""
        self._unacknowledged += nbytes
        if self._unacknowledged >= WINDOW_UPDATE_NBYTES:
            self.send_control(frames.window_update(0, self._unacknowledged))
            self._receive_window += self._unacknowledged
            self._unacknowledged = 0
        if stream is not None:
            stream.unacknowledged += nbytes
            if stream.unacknowledged >= WINDOW_UPDATE_NBYTES and not stream.ended:
                self.send_control(frames.window_update(stream.id, stream.unacknowledged))
                stream.receive_window += stream.unacknowledged
                stream.unacknowledged = 0

    def read_data_into(self, target: memoryview) -> int:
        """Fills the start of ``target`` from the current DATA frame; returns the count, which is not zero."""
        count = self.io.read_into(target[: self.data_left])
        self.data_left -= count
        return count

    def buffer_data_frame(self) -> None:
        """Moves the rest of the current DATA frame to the stream's buffer, so that the next frame can be read."""
        if self.stream is not None and self.data_left:
            receive_buffer = self.stream.receive_buffer
            start, end = len(receive_buffer), len(receive_buffer) + self.data_left
            receive_buffer.extend(bytes(self.data_left))
            with memoryview(receive_buffer) as view:
                while start < end:
                    start += self.read_data_into(view[start:end])

    def handle_available_frames(self) -> None:
        """Handles the frames that have arrived whole, without waiting.

        Stops where the receive buffer is full, and where the peer has reset the running call: what follows belongs to
        the time after the call. Reads the socket a few times at most, so a peer that never stops sending cannot keep
        the thread here.

        Raises:
            ConnectionError: The peer has gone or broke the protocol.
        """
        self.handle_buffered_frames()
        for _ in range(_READS_PER_CHECK):
            if not self._wants_more() or not self.io.fill_nonblocking():
                return
            self.handle_buffered_frames()

    def handle_buffered_frames(self) -> None:
        """Does as `handle_available_frames`, but reads nothing from the socket."""
        while self._wants_more() and self._handle_next():
            pass

    def _wants_more(self) -> bool:
        return self.stream is None or (len(self.stream.receive_buffer) < BUFFER_NBYTES and not self.stream.reset)

    def _handle_next(self) -> bool:
        """Handles the next frame if it has arrived whole; returns whether it had."""
        if not self._has_whole_frame():
            return False
        if not self.data_left:
            self.handle_frame()
        self.buffer_data_frame()
        return True

    def _has_whole_frame(self) -> bool:
        io = self.io
        buffered = io.high - io.low
        if self.data_left:
            return buffered >= self.data_left
        if self._skip_left and buffered:
            self._skip_left -= io.skip(self._skip_left)
            buffered = io.high - io.low
        if self._skip_left or buffered < frames.HEADER_NBYTES:
            return False
        length, kind, flags, _ = frames.parse_header(io.buffer, io.low)
        if kind == frames.HEADERS and not flags & frames.END_HEADERS:
            return False
        return buffered >= frames.HEADER_NBYTES + length

    def _is_short_frame(self) -> bool:
        """Whether the next frame, of which a part has arrived, fits the buffer and can be handled from there."""
        io = self.io
        if self.data_left or self._skip_left or (io.tls is not None and io.tls.pending()):
            return False
        if io.high - io.low < frames.HEADER_NBYTES:
            return True
        length, kind, flags, _ = frames.parse_header(io.buffer, io.low)
        is_whole_block = kind != frames.HEADERS or flags & frames.END_HEADERS
        return bool(is_whole_block and frames.DATA < kind <= frames.CONTINUATION and length <= _MAX_CONTROL_NBYTES)

    def handle_frame(self) -> None:
        """Waits for a frame and handles it; of the active stream's DATA, only the header: see `data_left`.

        Raises:
            EndOfConnectionError: The peer closed the connection between two frames.
            PeerGoneError: The peer has gone, or does not handle the running call.
            ProtocolError: The peer broke the protocol.
            TimeoutError: The socket's timeout passed; if no frame had begun, the connection is still usable.
        """
        io = self.io
        io.check()
        while self._skip_left:
            self._skip_left -= io.skip(self._skip_left)
        io.fill_or_end(frames.HEADER_NBYTES)
        length, kind, flags, stream_id = frames.parse_header(io.buffer, io.low)
        io.low += frames.HEADER_NBYTES
        try:
            if not self.settings_received and kind != frames.SETTINGS:
                self.connection_error(ErrorCode.PROTOCOL_ERROR, f"the first frame is of type {kind}, not SETTINGS")
            if kind == frames.DATA:
                self._handle_data(length, flags, stream_id)
            elif kind > frames.CONTINUATION:
                self.count_idle_frame()
                self._skip_left = length
            elif length > _MAX_CONTROL_NBYTES:
                self.connection_error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} has {length} bytes")
            elif kind == frames.HEADERS:
                self._handle_headers(io.take(length), flags, stream_id)
            else:
                self._handle_control(kind, flags, stream_id, io.take(length))
        except BaseException as error:
            io.broken = io.broken or f"handling a frame failed: {error or type(error).__name__}"
            raise

    def count_idle_frame(self, weight: int = 1) -> None:
        """Counts a frame that moves no call forward; closes the connection of a peer that floods it with such.

        Args:
            weight: The number of frames that it counts for.
        """
        self._idle_frames += weight
        if self._idle_frames >= _IDLE_FRAMES_PER_SECOND:
            now = time.monotonic()
            if now - self._idle_since < 1:
                reason = f"{self._idle_frames} idle frames within a second"
                self.connection_error(ErrorCode.ENHANCE_YOUR_CALM, reason)
            self._idle_frames, self._idle_since = 0, now

    def active_stream(self, stream_id: int, frame_name: str) -> Stream | None:
        """Returns the active stream if it has this number; None for a closed one. Others are an error."""
        if self.stream is not None and self.stream.id == stream_id:
            return self.stream
        if stream_id % 2 == 0 or stream_id > self.last_stream_id:
            reason = f"{frame_name} on stream {stream_id}, which was never opened"
            self.connection_error(ErrorCode.PROTOCOL_ERROR, reason)
        return None

    def _handle_data(self, length: int, flags: int, stream_id: int) -> None:
        stream = self.active_stream(stream_id, "DATA")
        if stream is not None and stream.ended:
            self.connection_error(ErrorCode.STREAM_CLOSED, f"DATA on stream {stream_id} after its end")
        self._receive_window -= length
        if self._receive_window < 0:
            self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, "DATA overruns the connection's window")
        if stream is None:
            self._skip_left = length
            self.acknowledge_received_data(length, None)
            return
        stream.receive_window -= length
        if stream.receive_window < 0:
            self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, f"DATA overruns the window of stream {stream_id}")
        if flags & frames.END_STREAM:
            stream.ended = True
        elif not length:
            self.count_idle_frame()
        self.data_left = length
        if flags & frames.PADDED:
            padding = self.io.take(1)[0] if length else 0
            if padding >= length:
                self.connection_error(ErrorCode.PROTOCOL_ERROR, "the padding is longer than its DATA frame")
            self.data_left = length - 1 - padding
            self._skip_left = padding  # It follows the data, and is skipped before the next frame.
            self.acknowledge_received_data(1 + padding, stream)

    def _handle_headers(self, payload: bytes, flags: int, stream_id: int) -> None:
        start, end = 0, len(payload)
        if flags & frames.PADDED:
            start = 1
            end -= payload[0] if payload else 0
        if flags & frames.HAS_PRIORITY:
            start += 5
        if start > end:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, "the padding is longer than its HEADERS frame")
        block = payload[start:end]
        complete = flags & frames.END_HEADERS
        while not complete and len(block) <= HEADER_LIST_NBYTES:
            complete, fragment = self._read_continuation(stream_id)
            block += fragment
        if len(block) > HEADER_LIST_NBYTES:
            reason = f"a header block has more than {HEADER_LIST_NBYTES} bytes"
            self.connection_error(ErrorCode.ENHANCE_YOUR_CALM, reason)
        try:
            headers = self._decoder.decode(block)
        except HPACKError as error:
            self.connection_error(ErrorCode.COMPRESSION_ERROR, f"a header block cannot be decoded: {error}")
        ended = bool(flags & frames.END_STREAM)
        if stream_id % 2 and stream_id > self.last_stream_id:
            self.stream_opened(stream_id, headers, ended)
        elif (stream := self.active_stream(stream_id, "HEADERS")) is not None:
            if stream.ended:
                self.connection_error(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id} after its end")
            stream.headers_received(headers, ended)

    def _read_continuation(self, stream_id: int) -> tuple[int, bytes]:
        length, kind, flags, continued = frames.parse_header(self.io.take(frames.HEADER_NBYTES), 0)
        if kind != frames.CONTINUATION or continued != stream_id:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} stands inside a header block")
        if length > HEADER_LIST_NBYTES:
            reason = f"a header block has more than {HEADER_LIST_NBYTES} bytes"
            self.connection_error(ErrorCode.ENHANCE_YOUR_CALM, reason)
        self.count_idle_frame()
        return flags & frames.END_HEADERS, self.io.take(length)

    def _handle_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handles a frame other than DATA and HEADERS."""
        if (size := _PAYLOAD_NBYTES.get(kind)) is not None and len(payload) != size:
            reason = f"a frame of type {kind} has {len(payload)} bytes, not {size}"
            self.connection_error(ErrorCode.FRAME_SIZE_ERROR, reason)
        if (kind in _CONNECTION_FRAMES and stream_id) or (kind in _STREAM_FRAMES and not stream_id):
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} came on stream {stream_id}")
        if kind == frames.WINDOW_UPDATE:
            self._handle_window_update(stream_id, frames.UINT32.unpack(payload)[0] & frames.MAX_WINDOW)
            return
        if kind == frames.SETTINGS:
            self._handle_settings(flags, payload)
        elif kind == frames.PING:
            if not flags & frames.ACK:
                self.send_control(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM:
            self._handle_rst_stream(stream_id, frames.UINT32.unpack(payload)[0])
        elif kind == frames.GOAWAY:
            self._handle_goaway(payload)
        elif kind != frames.PRIORITY:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} came where none may")
        self.count_idle_frame()

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
                self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, reason)

    def _handle_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                self.connection_error(ErrorCode.FRAME_SIZE_ERROR, "the acknowledgement of SETTINGS has a payload")
            return
        if len(payload) % frames.SETTING.size:
            self.connection_error(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        for key, value in frames.SETTING.iter_unpack(payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                self._set_initial_send_window(value)
            elif key == frames.MAX_FRAME_SIZE:
                if not frames.MIN_FRAME_SIZE <= value <= frames.LARGEST_FRAME_SIZE:
                    self.connection_error(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
                self.max_frame_size = value
            elif key == frames.ENABLE_PUSH and value > 1:
                self.connection_error(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value}")
            elif key == frames.HEADER_TABLE_SIZE and value < _DEFAULT_TABLE_NBYTES:
                self.table_size_update = _TABLE_SIZE_ZERO
        self.settings_received = True
        self.send_control(frames.frame(frames.SETTINGS, frames.ACK, 0, b""))

    def _set_initial_send_window(self, value: int) -> None:
        if value > frames.MAX_WINDOW:
            self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")
        if self.stream is not None:
            self.stream.send_window += value - self.initial_send_window
            if self.stream.send_window > frames.MAX_WINDOW:
                self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS makes a stream's window too large")
        self.initial_send_window = value

    def _handle_rst_stream(self, stream_id: int, code: int) -> None:
        stream = self.active_stream(stream_id, "RST_STREAM")
        if stream is not None:
            stream.ended = stream.reset = True
            stream.failure = stream.failure or error_of_reset(code)
            self.acknowledge_received_data(len(stream.receive_buffer), None)
            stream.receive_buffer.clear()

    def _handle_goaway(self, payload: bytes) -> None:
        if len(payload) < 8:
            self.connection_error(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        last, code = (frames.UINT32.unpack_from(payload, offset)[0] for offset in (0, 4))
        self.going_away = True
        if self.goaway_ends_call(last & frames.MAX_STREAM_ID):
            reason = payload[8:].decode(errors="replace")
            raise PeerGoneError(f"the peer gave the connection up with GOAWAY, {error_name(code)} {reason}".rstrip())
