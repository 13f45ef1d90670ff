"""What both ends of a connection share: taking frames apart, flow control, and the frames about the connection."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from typing import NoReturn

from hpack import HPACKError

from bngrad_wire.http2 import control, frames
from bngrad_wire.http2.buffered_socket import BUFFER_NBYTES, BufferedSocket
from bngrad_wire.http2.errors import (
    ErrorCode,
    ProtocolError,
)
from bngrad_wire.http2.frames import Buffer
from bngrad_wire.http2.header_block import HEADER_LIST_NBYTES, BlockDecoder
from bngrad_wire.http2.stream import Stream

_CONTROL_NBYTES = BUFFER_NBYTES // 2  # The longest frame, other than DATA, that is read.
_CREDIT_NBYTES = 2**28  # Window is given back in steps of so many bytes.
_LOOKS = 2  # At what has arrived, so that the end is seen of a peer that has said something before it.
_IDLE_FRAMES_PER_SECOND = 2000  # Frames that move no call forward, before the peer is taken to be flooding.


class BaseConnection(ABC):
    """One end of a connection.

    Attributes:
        io: The socket.
        stream: The running call.
        last_stream_id: The greatest stream that was opened.
        going_away: The peer sent GOAWAY.
        data_left: Unread bytes of the running call's present DATA frame.
        held: Frames that leave with the next `flush`.
        may_wait: Whether sending may wait until the socket has taken all of it; else what it does not take is held.
        settings_seen: The peer's first SETTINGS have come.
        send_window: Bytes that the peer takes on the connection for now.
        initial_send_window: Bytes that it takes on a new stream.
        max_frame_size: The longest payload that it takes in a frame.
        table_update: What the next header block sent must begin with.
    """

    def __init__(self, sock: socket.socket, opening: bytes) -> None:
        self.io = BufferedSocket(sock)
        self.stream: Stream | None = None
        self.last_stream_id = 0
        self.going_away = False
        self.data_left = 0
        self.outbound: list[Buffer] = []
        self.blocking = True
        self.send_window = frames.DEFAULT_WINDOW
        self.initial_send_window = frames.DEFAULT_WINDOW
        self.max_frame_size = frames.MIN_FRAME_SIZE
        self.table_size_update = b""
        self._skip_left = 0  # Padding, and data of a call that is over.
        self._receive_window = frames.MAX_WINDOW
        self._unacknowledged = 0
        self._decoder = BlockDecoder()
        self.settings_received = False
        self._idle_frames = 0
        self._idle_since = 0.0
        try:
            self.io.send([opening + frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)])
        except BaseException:
            self.io.close()
            raise

    @abstractmethod
    def stream_opened(self, stream_id: int, headers: dict[str, str], end: bool) -> None:
        """Takes the header block that opens a stream."""

    @abstractmethod
    def goaway_ends_call(self, last_stream_id: int) -> bool:
        """Says whether the peer's GOAWAY, which names the last stream it takes, ends the running call."""

    def close(self) -> None:
        """Closes the socket, after a last GOAWAY where that needs no waiting (RFC 9113, section 6.8).

        A call that runs is lost.
        """
        self.io.close(frames.goaway(self.last_stream_id, ErrorCode.NO_ERROR))
        self.stream = None  # each refers to the other, and would stay until garbage is collected

    def connection_error(self, code: ErrorCode, reason: str) -> NoReturn:
        """Ends the connection for what the peer did.

        Raises:
            ProtocolError: Always.
        """
        self.io.close(frames.goaway(self.last_stream_id, code, reason))
        self.io.broken = reason
        raise ProtocolError(reason)

    def send_control(self, frame: bytes) -> None:
        """Sends a frame that the peer's frames call for; holds it where nothing may wait."""
        if self.blocking:
            self.io.send([frame])
        else:
            self.outbound.append(frame)

    def flush(self) -> None:
        """Sends what is held; where nothing may wait, as much of it as the socket takes."""
        if self.outbound:
            pieces, self.outbound = self.outbound, []
            if rest := self.io.send(pieces, blocking=self.blocking):
                self.outbound.append(rest)

    def close_stream(self, stream: Stream) -> None:
        """Ends a call on this side; what is unread of it will be thrown away."""
        if stream is self.stream:
            self.stream = None
            self._skip_left += self.data_left
            unread = self.data_left + len(stream.receive_buffer)
            self.data_left = 0
            self.acknowledge_received_data(unread, None)

    def acknowledge_received_data(self, nbytes: int, stream: Stream | None) -> None:
        """Notes that ``nbytes`` of DATA were used up, and now and then lets the peer know (RFC 9113, section 5.2)."""
        self._unacknowledged += nbytes
        if self._unacknowledged >= _CREDIT_NBYTES:
            self.send_control(frames.window_update(0, self._unacknowledged))
            self._receive_window += self._unacknowledged
            self._unacknowledged = 0
        if stream is not None:
            stream.unacknowledged += nbytes
            if stream.unacknowledged >= _CREDIT_NBYTES and not stream.ended:
                self.send_control(frames.window_update(stream.id, stream.unacknowledged))
                stream.receive_window += stream.unacknowledged
                stream.unacknowledged = 0

    def read_data_into(self, target: memoryview) -> int:
        """Fills the start of ``target`` from the present DATA frame, and gives the count, which is not zero."""
        count = self.io.read_into(target[: self.data_left])
        self.data_left -= count
        return count

    def buffer_data_frame(self) -> None:
        """Moves what is left of the present DATA frame out of the way of the frames behind it."""
        if self.stream is not None and self.data_left:
            receive_buffer = self.stream.receive_buffer
            start, end = len(receive_buffer), len(receive_buffer) + self.data_left
            receive_buffer.extend(bytes(self.data_left))
            with memoryview(receive_buffer) as view:
                while start < end:
                    start += self.read_data_into(view[start:end])

    def handle_available_frames(self) -> None:
        """Handles the frames that have arrived whole, without waiting; stops where much DATA is in the way.

        Also stops where the peer has reset the running call: what follows is for the time after it. And after a few
        looks at the socket: a peer that never stops sending would keep whoever asks for ever, and what that one holds.

        Raises:
            ConnectionError: The peer has gone or broke the protocol.
        """
        self.handle_buffered_frames()
        for _ in range(_LOOKS):
            if not self._has_use_for_more() or not self.io.fill_nonblocking():
                return
            self.handle_buffered_frames()

    def handle_buffered_frames(self) -> None:
        """Does as `handle_available_frames`, but reads nothing from the socket."""
        while self._has_use_for_more() and self._handle_next():
            pass

    def _has_use_for_more(self) -> bool:
        return self.stream is None or (len(self.stream.receive_buffer) < BUFFER_NBYTES and not self.stream.reset)

    def _handle_next(self) -> bool:
        """Handles the next frame if it has arrived whole, and says whether it had."""
        if not self._frame_has_arrived():
            return False
        if not self.data_left:
            self.handle_frame()
        self.buffer_data_frame()
        return True

    def _frame_has_arrived(self) -> bool:
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
        """Whether the next frame, of which a part has arrived, can be handled once it is whole in the buffer."""
        io = self.io
        if self.data_left or self._skip_left or (io.tls is not None and io.tls.pending()):
            return False
        if io.high - io.low < frames.HEADER_NBYTES:
            return True
        length, kind, flags, _ = frames.parse_header(io.buffer, io.low)
        is_whole = kind != frames.HEADERS or flags & frames.END_HEADERS
        return bool(is_whole and frames.DATA < kind <= frames.CONTINUATION and length <= _CONTROL_NBYTES)

    def handle_frame(self) -> None:
        """Waits for a frame and acts on it; of DATA of the running call, only the header: see `data_left`.

        Raises:
            EndOfConnectionError: The peer closed the connection, and no frame was begun.
            PeerGoneError: The peer has gone, or does not take the running call.
            ProtocolError: The peer broke the protocol.
            TimeoutError: The socket's timeout passed; if no frame was begun, the connection is as it was.
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
                self._data(length, flags, stream_id)
            elif kind > frames.CONTINUATION:
                self.count_idle_frame()
                self._skip_left = length
            elif length > _CONTROL_NBYTES:
                self.connection_error(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} has {length} bytes")
            elif kind == frames.HEADERS:
                self._headers(io.take(length), flags, stream_id)
            else:
                control.handle(self, kind, flags, stream_id, io.take(length))
        except BaseException as error:
            io.broken = io.broken or f"handling a frame failed: {error or type(error).__name__}"
            raise

    def count_idle_frame(self, weight: int = 1) -> None:
        """Ends the connection of a peer that floods it with frames that move no call forward.

        Args:
            weight: As how many frames it counts.
        """
        self._idle_frames += weight
        if self._idle_frames >= _IDLE_FRAMES_PER_SECOND:
            now = time.monotonic()
            if now - self._idle_since < 1:
                self.connection_error(ErrorCode.ENHANCE_YOUR_CALM, f"{self._idle_frames} idle frames within a second")
            self._idle_frames, self._idle_since = 0, now

    def active_stream(self, stream_id: int, what: str) -> Stream | None:
        """Gives the running call if it has this number; None stands for a call that is over."""
        if self.stream is not None and self.stream.id == stream_id:
            return self.stream
        if stream_id % 2 == 0 or stream_id > self.last_stream_id:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"{what} on stream {stream_id}, which was never opened")
        return None

    def _data(self, length: int, flags: int, stream_id: int) -> None:
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
            self._skip_left = padding
            self.acknowledge_received_data(1 + padding, stream)
            # The padding is skipped before the next frame, so after the data.

    def _headers(self, payload: bytes, flags: int, stream_id: int) -> None:
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
            complete, fragment = self._continuation(stream_id)
            block += fragment
        if len(block) > HEADER_LIST_NBYTES:
            self.connection_error(
                ErrorCode.ENHANCE_YOUR_CALM, f"a header block has more than {HEADER_LIST_NBYTES} bytes"
            )
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

    def _continuation(self, stream_id: int) -> tuple[int, bytes]:
        length, kind, flags, continued = frames.parse_header(self.io.take(frames.HEADER_NBYTES), 0)
        if kind != frames.CONTINUATION or continued != stream_id:
            self.connection_error(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} stands inside a header block")
        if length > HEADER_LIST_NBYTES:
            self.connection_error(
                ErrorCode.ENHANCE_YOUR_CALM, f"a header block has more than {HEADER_LIST_NBYTES} bytes"
            )
        self.count_idle_frame()
        return flags & frames.END_HEADERS, self.io.take(length)
