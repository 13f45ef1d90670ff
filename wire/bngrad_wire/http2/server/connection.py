"""The server end of a connection: accepts calls, one after the other."""

from __future__ import annotations

import socket
import time

from bngrad_wire.http2 import frames
from bngrad_wire.http2.block_decoder import HEADER_LIST_NBYTES, REQUEST_PSEUDO_HEADERS, HeaderBlock
from bngrad_wire.http2.connection import BaseConnection
from bngrad_wire.http2.errors import EndOfConnectionError, ErrorCode, Status
from bngrad_wire.http2.server.call import ServerCall
from bngrad_wire.http2.server.non_grpc_request import NonGrpcRequest
from bngrad_wire.http2.server.request_headers import (
    CallHeaders,
    check_trailers,
    content_length,
    has_valid_length,
    is_grpc,
)
from bngrad_wire.http2.sockets.receive_buffer import BUFFER_NBYTES, LARGE_BUFFER_NBYTES
from bngrad_wire.http2.stream import Stream

_SETTINGS = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: 1,
        frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: HEADER_LIST_NBYTES,
    }
)
_KIND_AT = 3
"""Where a frame's header has its kind."""
_CONTROL_FRAMES = 8
_REST_TIMEOUT_S = 0.01
"""How long the rest of a call is awaited, so that it can be taken whole."""


class ServerConnection(BaseConnection):
    """A connection that accepts calls, one after the other.

    Attributes:
        max_whole_nbytes: The most DATA of a call for which a large buffer is taken, so that it can be taken whole.
        awaits_rest: Whether the buffered beginning of a call waits for the rest; `accept_nonblocking` looks for how
            long.

    Args:
        sock: An accepted stream socket, which the connection owns from then on; its timeout bounds every wait.

    Raises:
        PeerGoneError: The peer has gone already.
    """

    _frames_per_reset = 10

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _SETTINGS, REQUEST_PSEUDO_HEADERS, frames.MIN_FRAME_SIZE)
        self.max_whole_nbytes = LARGE_BUFFER_NBYTES - BUFFER_NBYTES
        self._preface_seen = False
        self._sent_goaway = False
        self._last_block: HeaderBlock | None = None  # of the last call that may come again as it was
        self._last_headers = CallHeaders("", None, {})
        self._last_nbytes = 0  # of the last call's DATA
        self.awaits_rest = False
        self._rest_until = 0.0

    def accept(self) -> ServerCall | None:
        """Waits for the next call.

        Returns:
            The call, or None after `goaway` or once the client has closed the connection between two frames.

        Raises:
            RuntimeError: The previous call was not ended.
            PeerGoneError: The client has gone in the middle of a frame.
            ProtocolError: The client broke the protocol.
            TimeoutError: The socket's timeout passed; if no frame had begun, this may be called again.
        """
        if self.stream is not None:
            raise RuntimeError("the previous call was not ended")
        if self._sent_goaway:
            return None
        try:
            self._read_preface()
            self.flush()
            while not isinstance(self.stream, ServerCall):
                self.handle_frame()
        except EndOfConnectionError:
            return None
        return self.stream

    def accept_nonblocking(self) -> ServerCall | None:
        """Handles some frames that have arrived, without waiting, and returns the running call, if any.

        For an event loop with many connections: it makes one system call at most, and handles 64 frames at most; see
        `has_pending_input`. What it sends waits only where `blocking` is true.

        Raises:
            PeerGoneError: The client has closed or reset the connection.
            ProtocolError: The client broke the protocol.
        """
        io = self.io
        if not self._has_buffered_input():
            if self.expects_large_call and self.stream is None:
                io.enlarge()
            io.fill_nonblocking()
        if self.stream is None:
            self._handle_control_frames()
            call = self._take_whole_call()
            if call is not None or self._may_await_rest():
                return call
        if self._take_preface():
            self.handle_buffered_frames()
        io.shrink()
        return self.stream if isinstance(self.stream, ServerCall) else None

    @property
    def expects_large_call(self) -> bool:
        """Whether the last call was large, but small enough to be taken whole: the next one probably is, too."""
        return BUFFER_NBYTES < self._last_nbytes < self.max_whole_nbytes

    def _may_await_rest(self) -> bool:
        """Whether to handle nothing yet, since the rest of a call may arrive soon, so that it can be taken whole."""
        if not self.awaits_rest:
            self._rest_until = 0.0
            return False
        now = time.monotonic()
        self._rest_until = self._rest_until or now + _REST_TIMEOUT_S
        self.awaits_rest = now < self._rest_until
        return self.awaits_rest

    def _handle_control_frames(self) -> None:
        """Handles some of the frames that come before the next call, so that it can be taken whole."""
        io = self.io
        for _ in range(_CONTROL_FRAMES):
            is_known = self.is_before_call and io.high - io.low >= frames.HEADER_NBYTES
            if not is_known or io.buffer[io.low + _KIND_AT] == frames.HEADERS or not self._has_buffered_input():
                return
            self.handle_frame()

    def _take_whole_call(self) -> ServerCall | None:
        """Takes a call that has arrived whole and begins like the one before, at less cost than frame by frame.

        Accounts for its frames all the same. Returns None, and takes nothing, if what comes next is anything else.
        """
        io = self.io
        self.awaits_rest = False
        start = io.low + frames.HEADER_NBYTES
        if start > io.high or self._sent_goaway or not self.is_before_call:
            return None
        length, kind, flags, stream_id = frames.parse_header(io.buffer, io.low)
        end = start + length
        if kind != frames.HEADERS or flags != frames.END_HEADERS or end > io.high:
            return None
        block = self.known_block(bytes(io.buffer[start:end]))
        if block is None or block is not self._last_block or not self._is_next_stream(stream_id):
            return None
        whole = frames.find_data(io.buffer, end, io.high, stream_id, self.max_receive_frame_size)
        if whole is None or isinstance(whole, int):
            self.awaits_rest = whole is not None and io.is_large and whole - io.low <= LARGE_BUFFER_NBYTES
            return None
        data, frame_count, end = whole
        call = ServerCall(self, stream_id, self._last_headers)
        self.stream = call
        if not self.account_for_frames(call, frame_count + 1, length, len(data)):
            self.stream = None
            return None
        io.low = end
        io.shrink()
        self.last_stream_id = stream_id
        self._rest_until = 0.0
        call.receive_buffer = data
        call.ended = call.peer_ended = True
        return call

    def _is_next_stream(self, stream_id: int) -> bool:
        return stream_id > self.last_stream_id and stream_id % 2 == 1

    @property
    def has_pending_input(self) -> bool:
        """Whether `accept_nonblocking` has more to handle even if the socket does not become readable."""
        tls = self.io.tls
        return self._has_buffered_input() or (tls is not None and tls.pending() > 0)

    def _has_buffered_input(self) -> bool:
        io = self.io
        return io.high > io.low and self._preface_seen and not self.awaits_rest and self._is_next_ready()

    def goaway(self) -> None:
        """Tells the client that no more calls are accepted; it may retry elsewhere one that it began meanwhile."""
        self._sent_goaway = True
        self.send_control(frames.goaway(self.last_peer_stream_id, ErrorCode.NO_ERROR))

    def _read_preface(self) -> None:
        io = self.io
        while not self._take_preface():
            io.fill_or_end(io.high - io.low + 1)

    def _take_preface(self) -> bool:
        io = self.io
        if not self._preface_seen:
            so_far = bytes(io.buffer[io.low : min(io.high, io.low + len(frames.PREFACE))])
            if not frames.PREFACE.startswith(so_far):
                reason = f"the client does not begin with the preface of HTTP/2: {so_far!r}"
                self.connection_error(ErrorCode.PROTOCOL_ERROR, reason)
            if so_far == frames.PREFACE:
                io.low += len(frames.PREFACE)
                self._preface_seen = True
        return self._preface_seen

    def close_stream(self, stream: Stream) -> None:
        """Closes a stream on this side, and notes how much DATA the client has sent on it."""
        self._last_nbytes = frames.MAX_WINDOW - stream.receive_window
        super().close_stream(stream)

    def stream_opened(self, stream_id: int, block: HeaderBlock, end: bool) -> None:
        """Begins a call with the header block; refuses it while another call runs, and after `goaway`."""
        self.last_stream_id = stream_id
        if self.is_full or self._sent_goaway:
            self._refuse_stream(stream_id, ErrorCode.REFUSED_STREAM, end)
        elif block.is_too_large:
            call = self.new_call(stream_id, CallHeaders("", None, {}))
            self.begin(call, end)
            call.end(Status.RESOURCE_EXHAUSTED, f"the metadata has more than {HEADER_LIST_NBYTES} bytes")
        elif block.fault or not block.is_opening or not has_valid_length(block.headers, end):
            self._refuse_stream(stream_id, ErrorCode.PROTOCOL_ERROR, end)
        elif is_grpc(block.headers):
            self._begin_call(stream_id, block, end)
        else:
            request = NonGrpcRequest(self, stream_id, block.headers)
            self.begin(request, end)
            request.progressed()

    def _begin_call(self, stream_id: int, block: HeaderBlock, end: bool) -> None:
        headers = self._last_headers if block is self._last_block else CallHeaders.of(block.headers)
        call = self.new_call(stream_id, headers)
        received = self.begin(call, end)
        if headers.fault:
            call.end(Status.INTERNAL, headers.fault)
        elif "content-length" in block.headers:
            received.content_left = content_length(block.headers)
        else:
            self._last_block, self._last_headers = block, headers

    @property
    def is_full(self) -> bool:
        """Whether no other call may begin now."""
        return self.stream is not None

    def new_call(self, stream_id: int, headers: CallHeaders) -> ServerCall:
        """Makes a call, which `begin` begins."""
        return ServerCall(self, stream_id, headers)

    def begin(self, stream: Stream, end: bool) -> Stream:
        """Begins a call or another request; returns the stream by which it is received."""
        stream.peer_ended = end
        stream.ended = stream.ended or end
        self.stream = stream
        return stream

    def _refuse_stream(self, stream_id: int, code: ErrorCode, end: bool) -> None:
        self.send_control(frames.rst_stream(stream_id, code))
        if not end:
            self.expect_late_frames(stream_id)

    def headers_received(self, stream: Stream, block: HeaderBlock, end: bool) -> None:
        """Handles the client's trailers, whose contents are ignored."""
        check_trailers(self, stream, block, end)
        stream.ended = True
        stream.progressed()

    @property
    def last_peer_stream_id(self) -> int:
        """The greatest number of any stream: the client opens all."""
        return self.last_stream_id

    def goaway_ends_call(self, last_stream_id: int) -> bool:
        """Returns False: the running call was opened by the client itself."""
        return False
