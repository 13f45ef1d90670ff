"""What client and server connections share: reading frames, and flow control (RFC 9113)."""

from __future__ import annotations

import socket
from abc import abstractmethod
from collections.abc import Set as AbstractSet

from hpack import HPACKError

from bngrad_wire.http2 import frames
from bngrad_wire.http2.block_decoder import BlockDecoder, HeaderBlock
from bngrad_wire.http2.connection_state import EARNING_SHIFT, ConnectionState
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.sockets.receive_buffer import BUFFER_NBYTES
from bngrad_wire.http2.stream import Stream

_LARGE_FRAMES = frames.settings({frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME_SIZE})
_MAX_CONTROL_NBYTES = BUFFER_NBYTES - frames.HEADER_NBYTES
"""The longest payload that is accepted of frames other than DATA: what the buffer holds."""
_MAX_BLOCK_NBYTES = BUFFER_NBYTES
"""The longest header block that is decoded; one that says more than it may then fails its call alone."""
_MAX_CONTINUATIONS = 32
FRAMES_PER_TURN = 64
"""Frames that `BaseConnection.handle_buffered_frames` handles before others get their turn."""
_READS_PER_CHECK = 2
"""Reads of the socket by `handle_available_frames`; the second sees the end of a peer that sent something before it."""
_LATE_EARNING_SHIFT = 14
"""DATA of a closed stream, which may have been on its way, earns a frame for each 16 KiB."""


class _PartialBlock:
    """A header block whose last fragment has not arrived yet."""

    __slots__ = ("continuations", "flags", "fragments", "stream_id")

    def __init__(self, stream_id: int, flags: int, fragment: bytes) -> None:
        self.stream_id = stream_id
        self.flags = flags
        self.fragments = bytearray(fragment)
        self.continuations = 0


class BaseConnection(ConnectionState):
    """One end of a connection.

    Attributes:
        max_receive_frame_size: The longest payload that this end accepts in a frame.
        takes_partial_data: Whether `handle_buffered_frames` handles DATA frames that have not arrived whole.
    """

    def __init__(
        self, sock: socket.socket, opening: bytes, pseudo_headers: AbstractSet[str], max_receive_frame_size: int
    ) -> None:
        super().__init__(sock)
        self.max_receive_frame_size = max_receive_frame_size
        self.takes_partial_data = False
        self._skip_left = 0  # Padding, and data of closed streams.
        self._partial_block: _PartialBlock | None = None
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
    def headers_received(self, stream: Stream, block: HeaderBlock, end: bool) -> None:
        """Handles a header block of the active stream."""

    def allow_large_frames(self) -> None:
        """Accepts frames of any size from now on; until then, a client's frames are short, as is what they can ask."""
        if self.max_receive_frame_size < frames.LARGEST_FRAME_SIZE:
            self.max_receive_frame_size = frames.LARGEST_FRAME_SIZE
            self.send_control(_LARGE_FRAMES)

    def close_stream(self, stream: Stream) -> None:
        """See `Carrier`."""
        if stream is self.stream:
            self.stream = None
            if not stream.peer_ended:
                self.expect_late_frames(stream.id)
            self._skip_left += self.data_left
            unread = self.data_left + len(stream.receive_buffer)
            self.data_left = 0
            self.acknowledge_received_data(unread, None)
            self.io.shrink()

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

    def account_for_frames(self, stream: Stream, frame_count: int, blocks_nbytes: int, data_nbytes: int) -> bool:
        """Takes frames of a running call off budget and windows at once, as `handle_frame` does one by one.

        Returns False, and does nothing, if they exceed these. The caller acknowledges the data.
        """
        cost = frame_count + (blocks_nbytes >> EARNING_SHIFT)
        if self.frame_budget < cost or min(self._receive_window, stream.receive_window) < data_nbytes:
            return False
        self.frame_budget -= cost
        self.earn(data_nbytes)
        self._receive_window -= data_nbytes
        stream.receive_window -= data_nbytes
        return True

    def read_data_into(self, target: memoryview) -> int:
        """See `Carrier`."""
        count = self.io.read_into(target[: self.data_left])
        self.data_left -= count
        return count

    def buffer_data_frame(self) -> None:
        """See `Carrier`."""
        if self.stream is not None and self.data_left:
            receive_buffer = self.stream.receive_buffer
            assert isinstance(receive_buffer, bytearray)  # as not all has arrived
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
        for _ in range(FRAMES_PER_TURN):
            if not (self._wants_more() and self._is_next_ready()):
                return
            if not self.data_left:
                self.handle_frame()
            self.buffer_data_frame()

    @property
    def is_amid_frame(self) -> bool:
        """Whether a frame or header block has begun to arrive and is not whole; to be asked when no input is pending.

        A payload that is skipped does not count.
        """
        return self.io.high > self.io.low or self._partial_block is not None

    def _wants_more(self) -> bool:
        stream = self.stream
        if stream is None:
            return True
        unread = len(stream.receive_buffer)
        # What is unread may still earn the frames that follow it.
        return unread < BUFFER_NBYTES and not stream.reset and (not unread or self.frame_budget > 0)

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
            stream = self.known_stream(stream_id)
            is_skipped = self.takes_partial_data or stream is None or stream.ended
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
            if not self.settings_received and kind != frames.SETTINGS:
                self.connection_error(ErrorCode.PROTOCOL_ERROR, f"the first frame is of type {kind}, not SETTINGS")
            elif length > self.max_receive_frame_size:
                reason = f"a frame of type {kind} has {length} bytes; the limit is {self.max_receive_frame_size}"
                self.connection_error(ErrorCode.FRAME_SIZE_ERROR, reason)
            elif self._partial_block is not None:
                self._continue_block(self._partial_block, length, kind, flags, stream_id)
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
        self.charge(len(data) >> EARNING_SHIFT)
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
            self.headers_received(stream, block, ended)
