"""What client and server connections share: reading frames, flow control, control frames (RFC 9113)."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from typing import ClassVar, NoReturn

from hpack import HPACKError

from bngrad_wire.http2 import frames
from bngrad_wire.http2.block_decoder import BlockDecoder, HeaderBlock
from bngrad_wire.http2.buffered_socket import BUFFER_NBYTES, BufferedSocket
from bngrad_wire.http2.errors import (
    ErrorCode,
    PeerGoneError,
    ProtocolError,
    RpcError,
    Status,
    error_name,
    error_of_reset,
)
from bngrad_wire.http2.frames import Buffer
from bngrad_wire.http2.stream import Stream

WINDOW_UPDATE_NBYTES = 2**28
"""The window of the peer is restored in steps of at least this."""
_MAX_CONTROL_NBYTES = BUFFER_NBYTES - frames.HEADER_NBYTES
"""The longest payload that is accepted of frames other than DATA: what the buffer holds."""
_MAX_BLOCK_NBYTES = BUFFER_NBYTES
"""The longest header block that is decoded; one that says more than it may then fails its call alone."""
_MAX_CONTINUATIONS = 32
_FRAMES_PER_TURN = 64
"""Frames that `BaseConnection.handle_buffered_frames` handles before others get their turn."""
_READS_PER_CHECK = 2
"""Reads of the socket by `handle_available_frames`; the second sees the end of a peer that sent something before it."""
_FRAMES_PER_SECOND = 2000
"""What a peer may send that moves no call forward. A frame costs one, and what it brings earns some back; so may a peer
save up as much, but no more."""
_FRAMES_OF_DISTRUSTED = 100
"""The same, see `BaseConnection.distrust`."""
_EARNING_SHIFT = 8
"""DATA of a running call, in either direction, earns a frame for each 256 bytes; a header block costs one for these."""
_LATE_EARNING_SHIFT = 14
"""DATA of a closed stream, which may have been on its way, earns a frame for each 16 KiB."""
_MAX_CLOSED_EARLY = 256
"""Streams that this end closed first, whose late frames are still expected."""
_DEFAULT_TABLE_NBYTES = 4096
_TABLE_SIZE_ZERO = b"\x20"
"""Sets the dynamic table of the encoder, which is never used, to size zero (RFC 7541, section 6.3)."""

_PAYLOAD_NBYTES = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_CONNECTION_FRAMES = {frames.SETTINGS, frames.PING, frames.GOAWAY}
_STREAM_FRAMES = {frames.PRIORITY, frames.RST_STREAM}


class _PartialBlock:
    """A header block whose last fragment has not arrived yet."""

    __slots__ = ("continuations", "flags", "fragments", "stream_id")

    def __init__(self, stream_id: int, flags: int, fragment: bytes) -> None:
        self.stream_id = stream_id
        self.flags = flags
        self.fragments = bytearray(fragment)
        self.continuations = 0


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
        max_receive_frame_size: The longest payload that this end accepts in a frame.
        table_size_update: What the next header block to be sent must begin with.
        frame_budget: How many frames the peer may still send before it is asked how fast they came.
    """

    _frames_per_reset: ClassVar[int]
    """What it costs the peer to reset a running call, above the frame itself."""

    def __init__(
        self, sock: socket.socket, opening: bytes, pseudo_headers: AbstractSet[str], max_receive_frame_size: int
    ) -> None:
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
        self.max_receive_frame_size = max_receive_frame_size
        self.table_size_update = b""
        self.frame_budget = self._frames_per_second = _FRAMES_PER_SECOND
        self._budget_at = time.monotonic()
        self._closed_early: dict[int, None] = {}
        self._skip_left = 0  # Padding, and data of closed streams.
        self._partial_block: _PartialBlock | None = None
        self._receive_window = frames.MAX_WINDOW
        self._unacknowledged = 0
        self._decoder = BlockDecoder(pseudo_headers)
        try:
            self.io.send([opening + frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)])
        except BaseException:
            self.io.close()
            raise

    @abstractmethod
    def stream_opened(self, stream_id: int, block: HeaderBlock, end: bool) -> None:
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

    def stream_error(self, stream: Stream, code: ErrorCode, reason: str) -> None:
        """Resets a stream because the peer broke the protocol on it alone (RFC 9113, section 5.4.2)."""
        self.send_control(frames.rst_stream(stream.id, code))
        if stream.failure is None:
            stream.failure = RpcError(Status.INTERNAL, reason)
        self._end_by_reset(stream)

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
            if not stream.peer_ended:
                self.closed_early(stream.id)
            self._skip_left += self.data_left
            unread = self.data_left + len(stream.receive_buffer)
            self.data_left = 0
            self.acknowledge_received_data(unread, None)

    def closed_early(self, stream_id: int) -> None:
        """Expects late frames of a stream that this end closed before the peer did."""
        self._closed_early[stream_id] = None
        if len(self._closed_early) > _MAX_CLOSED_EARLY:
            del self._closed_early[next(iter(self._closed_early))]

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

    @property
    def is_between_frames(self) -> bool:
        """Whether the next byte to be received begins a frame, and the running call has no unread data."""
        stream = self.stream
        return not (
            self.data_left
            or self._skip_left
            or self._partial_block is not None
            or not self.settings_received
            or stream is None
            or stream.receive_buffer
            or stream.ended
        )

    @property
    def is_before_call(self) -> bool:
        """Whether the next byte to be received begins a frame, and no call runs."""
        return self.stream is None and self.settings_received and not self._skip_left and self._partial_block is None

    def known_block(self, block: bytes) -> HeaderBlock | None:
        """Returns what a header block means that was decoded before; None for any other."""
        return self._decoder.known(block)

    def accept_whole(self, frame_count: int, blocks_nbytes: int, data_nbytes: int) -> bool:
        """Accounts for the frames of the running call that are taken from the buffer at once, as `handle_frame` would.

        Returns False, and does nothing, where that might have more consequences. The caller acknowledges the data.
        """
        stream, cost = self.stream, frame_count + (blocks_nbytes >> _EARNING_SHIFT)
        assert stream is not None
        if self.frame_budget < cost or min(self._receive_window, stream.receive_window) < data_nbytes:
            return False
        self.frame_budget -= cost
        self.earn(data_nbytes)
        self._receive_window -= data_nbytes
        stream.receive_window -= data_nbytes
        return True

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
        """Does as `handle_available_frames`, but reads nothing from the socket, and handles at most 64 frames."""
        for _ in range(_FRAMES_PER_TURN):
            if not (self._wants_more() and self._is_next_ready()):
                return
            if not self.data_left:
                self.handle_frame()
            self.buffer_data_frame()

    @property
    def is_amid_frame(self) -> bool:
        """Whether a frame, or a header block, has begun to arrive and is not whole; a payload to be skipped aside.

        While there is buffered input to handle, this says nothing.
        """
        return self.io.high > self.io.low or self._partial_block is not None

    def _wants_more(self) -> bool:
        return self.stream is None or (len(self.stream.receive_buffer) < BUFFER_NBYTES and not self.stream.reset)

    def _is_next_ready(self) -> bool:
        """Whether the next frame can be handled without waiting; skips what need not be handled."""
        io = self.io
        buffered = io.high - io.low
        if self.data_left:
            return buffered >= self.data_left
        if self._skip_left and buffered:
            self._skip_left -= io.skip(self._skip_left)
            buffered = io.high - io.low
        if self._skip_left or buffered < frames.HEADER_NBYTES:
            return False
        length, kind, _, stream_id = frames.parse_header(io.buffer, io.low)
        if kind == frames.DATA:
            is_skipped = self.stream is None or stream_id != self.stream.id or self.stream.ended
        else:
            is_skipped = kind > frames.CONTINUATION or length > _MAX_CONTROL_NBYTES
        # Of what is skipped, the first byte may be the length of its padding.
        return buffered >= frames.HEADER_NBYTES + (min(length, 1) if is_skipped else length)

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
        self.frame_budget -= 1
        try:
            if self.frame_budget < 0:
                self.charge(0)
            if self._partial_block is not None:
                self._continue_block(self._partial_block, length, kind, flags, stream_id)
            elif not self.settings_received and kind != frames.SETTINGS:
                self.connection_error(ErrorCode.PROTOCOL_ERROR, f"the first frame is of type {kind}, not SETTINGS")
            elif length > self.max_receive_frame_size:
                reason = f"a frame of type {kind} has {length} bytes; the limit is {self.max_receive_frame_size}"
                self.connection_error(ErrorCode.FRAME_SIZE_ERROR, reason)
            elif kind == frames.DATA:
                self._handle_data(length, flags, stream_id)
            elif kind > frames.CONTINUATION:
                self._skip_left = length
            elif length > _MAX_CONTROL_NBYTES:
                self.connection_error(ErrorCode.ENHANCE_YOUR_CALM, f"a frame of type {kind} has {length} bytes")
            elif kind == frames.HEADERS:
                self._handle_headers(io.take(length), flags, stream_id)
            else:
                self._handle_control(kind, flags, stream_id, io.take(length))
        except BaseException as error:
            io.broken = io.broken or f"handling a frame failed: {error or type(error).__name__}"
            raise

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

    def earn(self, nbytes: int, shift: int = _EARNING_SHIFT) -> None:
        """Adds to the peer's budget for bytes that moved a call forward."""
        self.frame_budget = min(self.frame_budget + (nbytes >> shift), self._frames_per_second)

    def distrust(self) -> None:
        """Allows fewer frames from now on to a peer that has flooded other connections."""
        self._frames_per_second = _FRAMES_OF_DISTRUSTED
        self.frame_budget = min(self.frame_budget, _FRAMES_OF_DISTRUSTED)

    def active_stream(self, stream_id: int, frame_name: str) -> Stream | None:
        """Returns the active stream if it has this number; None for a closed one. Others are an error."""
        if self.stream is not None and self.stream.id == stream_id:
            return self.stream
        if stream_id % 2 == 0 or stream_id > self.last_stream_id:
            reason = f"{frame_name} on stream {stream_id}, which was never opened"
            self.connection_error(ErrorCode.PROTOCOL_ERROR, reason)
        return None

    def _handle_late_frame(self, stream_id: int, kind: int, ended: bool) -> None:
        """Tolerates DATA and HEADERS on a closed stream if the peer may not have known that it is."""
        if stream_id in self._closed_early:
            if ended:
                del self._closed_early[stream_id]
        elif kind == frames.HEADERS and stream_id != self.last_stream_id:
            reason = f"HEADERS on stream {stream_id} after stream {self.last_stream_id}"
            self.connection_error(ErrorCode.PROTOCOL_ERROR, reason)
        else:
            reason = f"a frame of type {kind} came on stream {stream_id} after its end"
            self.connection_error(ErrorCode.STREAM_CLOSED, reason)

    def _handle_data(self, length: int, flags: int, stream_id: int) -> None:
        stream = self.active_stream(stream_id, "DATA")
        if stream is None or stream.peer_ended:
            self._handle_late_frame(stream_id, frames.DATA, bool(flags & frames.END_STREAM))
        self._receive_window -= length
        if self._receive_window < 0:
            self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, "DATA overruns the connection's window")
        if stream is None:
            self._discard_data(length, None)
            return
        stream.receive_window -= length
        if stream.receive_window < 0:
            self.connection_error(ErrorCode.FLOW_CONTROL_ERROR, f"DATA overruns the window of stream {stream_id}")
        padding = 0
        if flags & frames.PADDED:
            padding = self.io.take(1)[0] + 1 if length else 1
            if padding > length:
                self.connection_error(ErrorCode.PROTOCOL_ERROR, "the padding is longer than its DATA frame")
            self.acknowledge_received_data(padding, stream)
            length -= padding
            self._skip_left = padding - 1  # It follows the data, and is skipped before the next frame.
        stream.peer_ended = bool(flags & frames.END_STREAM)
        if stream.content_left is not None:
            self._check_content_length(stream, stream.content_left - length)
        if stream.ended:
            self._discard_data(length, stream)
            stream.progressed()
        else:
            stream.ended = stream.peer_ended
            self.data_left = length
            self.earn(length)

    def _discard_data(self, length: int, stream: Stream | None) -> None:
        self._skip_left += length
        self.acknowledge_received_data(length, stream)
        self.earn(length, _LATE_EARNING_SHIFT)

    def _check_content_length(self, stream: Stream, left: int) -> None:
        """Resets a stream whose request is not as long as it said it would be."""
        stream.content_left = left
        if left < 0 or (left and stream.peer_ended):
            self.stream_error(stream, ErrorCode.PROTOCOL_ERROR, "the request is not as long as its content-length says")

    def _handle_headers(self, payload: bytes, flags: int, stream_id: int) -> None:
        start, end = 0, len(payload)
        if flags & frames.PADDED:
            start = 1
            end -= payload[0] if payload else 0
        if flags & frames.HAS_PRIORITY:
            self._check_dependency(stream_id, payload[start : start + 4])
            start += 5
        if start > end:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, "the padding is longer than its HEADERS frame")
        if flags & frames.END_HEADERS:
            self._handle_block(payload[start:end], flags, stream_id)
        else:
            self._partial_block = _PartialBlock(stream_id, flags, payload[start:end])

    def _continue_block(self, block: _PartialBlock, length: int, kind: int, flags: int, stream_id: int) -> None:
        if kind != frames.CONTINUATION or stream_id != block.stream_id:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} stands inside a header block")
        block.continuations += 1
        if len(block.fragments) + length > _MAX_BLOCK_NBYTES or block.continuations > _MAX_CONTINUATIONS:
            reason = (
                f"a header block has more than {_MAX_BLOCK_NBYTES} bytes, or {_MAX_CONTINUATIONS} CONTINUATION frames"
            )
            self.connection_error(ErrorCode.ENHANCE_YOUR_CALM, reason)
        block.fragments += self.io.take(length)
        if flags & frames.END_HEADERS:
            self._partial_block = None
            self._handle_block(bytes(block.fragments), block.flags, block.stream_id)

    def _handle_block(self, data: bytes, flags: int, stream_id: int) -> None:
        """Handles a whole header block; the flags are those of its HEADERS frame."""
        self.charge(len(data) >> _EARNING_SHIFT)
        try:
            block = self._decoder.decode(data)
        except HPACKError as error:
            self.connection_error(ErrorCode.COMPRESSION_ERROR, f"a header block cannot be decoded: {error}")
        ended = bool(flags & frames.END_STREAM)
        if stream_id % 2 and stream_id > self.last_stream_id:
            self.stream_opened(stream_id, block, ended)
            return
        stream = self.active_stream(stream_id, "HEADERS")
        if stream is None or stream.peer_ended:
            self._handle_late_frame(stream_id, frames.HEADERS, ended)
        else:
            stream.peer_ended = ended
            stream.headers_received(block, ended)

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
            self.stream.progressed()
        self.initial_send_window = value

    def _handle_rst_stream(self, stream_id: int, code: int) -> None:
        stream = self.active_stream(stream_id, "RST_STREAM")
        if stream is None:
            self._closed_early.pop(stream_id, None)
            return
        self.charge(self._frames_per_reset)
        stream.peer_ended = True
        stream.failure = stream.failure or error_of_reset(code)
        self._end_by_reset(stream)

    def _end_by_reset(self, stream: Stream) -> None:
        stream.ended = stream.reset = True
        self.acknowledge_received_data(len(stream.receive_buffer), None)
        stream.receive_buffer.clear()
        stream.progressed()

    def _handle_goaway(self, payload: bytes) -> None:
        if len(payload) < 8:
            self.connection_error(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        last, code = (frames.UINT32.unpack_from(payload, offset)[0] for offset in (0, 4))
        self.going_away = True
        if self.goaway_ends_call(last & frames.MAX_STREAM_ID):
            reason = payload[8:].decode(errors="replace")
            raise PeerGoneError(f"the peer gave the connection up with GOAWAY, {error_name(code)} {reason}".rstrip())
