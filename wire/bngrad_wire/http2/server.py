"""The server end of a connection, and its calls."""

from __future__ import annotations

import functools
import re
import socket
from typing import TypeVar

from bngrad_wire.http2 import frames, header_block
from bngrad_wire.http2.block_decoder import HEADER_LIST_NBYTES, REQUEST_PSEUDO_HEADERS, HeaderBlock
from bngrad_wire.http2.call import BaseCall
from bngrad_wire.http2.connection import BaseConnection
from bngrad_wire.http2.errors import EndOfConnectionError, ErrorCode, RpcError, Status
from bngrad_wire.http2.stream import Stream

_SETTINGS = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: 1,
        frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: HEADER_LIST_NBYTES,
    }
)
_LARGE_FRAMES = frames.settings({frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME_SIZE})
_ANSWERED_CALL_NBYTES = 2048
"""What an answered call earns its client, as if it had sent this much more."""
_RESPONSE = [(":status", "200"), ("content-type", header_block.CONTENT_TYPE)]
_RESPONSE_BLOCK = header_block.encode(_RESPONSE)
_OK_BLOCK = header_block.encode(header_block.status_headers(0, "", b""))
_CONTENT_LENGTH = re.compile("[0-9]{1,18}")
_NOT_GRPC_BLOCK = header_block.encode([(":status", "415"), ("content-type", "text/plain")])
_NOT_GRPC_TEXT = b"This port serves gRPC: POST with content-type application/grpc.\n"


class ServerConnection(BaseConnection):
    """A connection that accepts calls, one after the other.

    Args:
        sock: An accepted stream socket, which the connection owns from then on; its timeout bounds every wait.

    Raises:
        PeerGoneError: The peer has gone already.
    """

    _frames_per_reset = 10

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _SETTINGS, REQUEST_PSEUDO_HEADERS, frames.MIN_FRAME_SIZE)
        self._preface_seen = False
        self._sent_goaway = False

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
        if not self._has_buffered_input():
            self.io.fill_nonblocking()
        if self._take_preface():
            self.handle_buffered_frames()
        return self.stream if isinstance(self.stream, ServerCall) else None

    @property
    def has_pending_input(self) -> bool:
        """Whether `accept_nonblocking` has more to handle even if the socket does not become readable."""
        tls = self.io.tls
        return self._has_buffered_input() or (tls is not None and tls.pending() > 0)

    def _has_buffered_input(self) -> bool:
        return self.io.high > self.io.low and self._preface_seen and self._is_next_ready()

    def goaway(self) -> None:
        """Tells the client that no more calls are accepted; it may retry elsewhere one that it began meanwhile."""
        self._sent_goaway = True
        self.io.send([frames.goaway(self.last_stream_id, ErrorCode.NO_ERROR)])

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

    def stream_opened(self, stream_id: int, block: HeaderBlock, end: bool) -> None:
        """Begins a call with the header block; refuses it while another call runs, and after `goaway`."""
        self.last_stream_id = stream_id
        if self.stream is not None or self._sent_goaway:
            self._refuse_stream(stream_id, ErrorCode.REFUSED_STREAM, end)
        elif block.is_too_large:
            reason = f"the metadata has more than {HEADER_LIST_NBYTES} bytes"
            self._begin(ServerCall(self, stream_id, {}), end).end(Status.RESOURCE_EXHAUSTED, reason)
        elif block.fault or not block.is_opening or not _has_valid_length(block.headers, end):
            self._refuse_stream(stream_id, ErrorCode.PROTOCOL_ERROR, end)
        elif _is_grpc(block.headers):
            self._begin(ServerCall(self, stream_id, block.headers), end).check_headers(block.headers)
        else:
            self._begin(_OtherRequest(self, stream_id, block.headers), end).progressed()

    def _begin(self, stream: _AnyStream, end: bool) -> _AnyStream:
        stream.peer_ended = end
        stream.ended = stream.ended or end
        self.stream = stream
        return stream

    def _refuse_stream(self, stream_id: int, code: ErrorCode, end: bool) -> None:
        self.send_control(frames.rst_stream(stream_id, code))
        if not end:
            self.closed_early(stream_id)

    def allow_large_frames(self) -> None:
        """Accepts frames of any size from now on; until then, a client's frames are short, as is what they can ask."""
        if self.max_receive_frame_size < frames.LARGEST_FRAME_SIZE:
            self.max_receive_frame_size = frames.LARGEST_FRAME_SIZE
            self.send_control(_LARGE_FRAMES)

    def append_headers(self, stream_id: int, block: bytes, flags: int) -> None:
        """Adds a header block to the outbound frames."""
        if self.table_size_update:
            block, self.table_size_update = self.table_size_update + block, b""
        self.outbound += frames.header_block(stream_id, block, flags)

    def goaway_ends_call(self, last_stream_id: int) -> bool:
        """Returns False: the running call was opened by the client itself."""
        return False


def _is_grpc(headers: dict[str, str]) -> bool:
    return headers[":method"] == "POST" and headers.get("content-type", "").startswith(header_block.CONTENT_TYPE)


def _has_valid_length(headers: dict[str, str], end: bool) -> bool:
    """Returns whether the content-length, if there is one, is a number, and zero if nothing follows."""
    length = headers.get("content-length", "0")
    return length == "0" or (_CONTENT_LENGTH.fullmatch(length) is not None and not (end and int(length)))


def _content_left(headers: dict[str, str]) -> int | None:
    length = headers.get("content-length")
    return None if length is None else int(length)


class _OtherRequest(Stream):
    """A request that is not gRPC: what it brings is discarded, and it is answered as the client's windows allow."""

    def __init__(self, connection: ServerConnection, stream_id: int, headers: dict[str, str]) -> None:
        super().__init__(stream_id, connection.initial_send_window)
        self.ended = True
        self.content_left = _content_left(headers)
        self._connection = connection
        self._text = _NOT_GRPC_TEXT
        self._headers_sent = False

    def headers_received(self, block: HeaderBlock, end: bool) -> None:
        """Handles the client's trailers."""
        _check_trailers(self._connection, self, block, end)
        self.progressed()

    def progressed(self) -> None:
        """Sends what the windows allow."""
        connection = self._connection
        if self.failure is None and self.peer_ended:
            if not self._headers_sent:
                self._headers_sent = True
                connection.append_headers(self.id, _NOT_GRPC_BLOCK, 0)
            room = min(len(self._text), self.send_window, connection.send_window)
            if room > 0:
                part, self._text = self._text[:room], self._text[room:]
                self.send_window -= room
                connection.send_window -= room
                end = 0 if self._text else frames.END_STREAM
                connection.outbound.append(frames.frame(frames.DATA, end, self.id, part))
            connection.flush()
        if self.failure is not None or not self._text:
            connection.close_stream(self)


def _check_trailers(connection: ServerConnection, stream: Stream, block: HeaderBlock, end: bool) -> None:
    """Resets the stream if its trailers are malformed."""
    if not end:
        connection.connection_error(ErrorCode.PROTOCOL_ERROR, f"a second header block on stream {stream.id}")
    if block.fault or block.has_pseudo_headers or stream.content_left:
        connection.stream_error(stream, ErrorCode.PROTOCOL_ERROR, block.fault or "the trailers are malformed")


class ServerCall(BaseCall):
    """A call as its server sees it, until `end`.

    Attributes:
        path: "/package.Service/Method".
        timeout_s: The client's deadline, in seconds from the start of the call; None is no limit.
        metadata: All headers except pseudo-headers; binary ones are still in base64.
    """

    _connection: ServerConnection

    def __init__(self, connection: ServerConnection, stream_id: int, headers: dict[str, str]) -> None:
        super().__init__(connection, stream_id)
        self.path = headers.get(":path", "")
        self.timeout_s: float | None = None
        self.metadata = {name: value for name, value in headers.items() if not name.startswith(":")}
        if "content-length" in headers:
            self.content_left = _content_left(headers)
        self._headers_sent = False

    def check_headers(self, headers: dict[str, str]) -> None:
        """Reads the headers that gRPC defines; ends the call if it cannot."""
        timeout = headers.get("grpc-timeout")
        if timeout is not None:
            try:
                self.timeout_s = header_block.parse_timeout(timeout)
            except ValueError as error:
                self.end(Status.INTERNAL, str(error))

    def headers_received(self, block: HeaderBlock, end: bool) -> None:
        """Handles the client's trailers, whose contents are ignored."""
        _check_trailers(self._connection, self, block, end)
        self.ended = True

    def _expect_large_message(self) -> None:
        self._connection.allow_large_frames()

    def _send_headers_once(self) -> None:
        if not self._headers_sent:
            self._headers_sent = True
            self._connection.append_headers(self.id, _RESPONSE_BLOCK, 0)

    def end(self, code: int = 0, message: str = "", details: bytes = b"") -> None:
        """Ends the call with a status; does nothing if it has ended or the client has reset it.

        Args:
            code: gRPC's status code; 0 is OK.
            message: What went wrong; any text.
            details: A serialised ``google.rpc.Status``.

        Raises:
            PeerGoneError: The connection is gone.
            TimeoutError: The socket's timeout passed.
        """
        block = _OK_BLOCK
        if code or message or details:
            block = _status_block(code, message, details)
        connection = self._connection
        if connection.stream is not self:
            return
        if self.failure is None and not self.ended:
            connection.handle_available_frames()
        if self.failure is None:
            if self._headers_sent:
                connection.earn(_ANSWERED_CALL_NBYTES)
            else:
                block = _RESPONSE_BLOCK + block
            connection.append_headers(self.id, block, frames.END_STREAM)
            if not self.ended:
                connection.outbound.append(frames.rst_stream(self.id, ErrorCode.NO_ERROR))
        self.failure = self.failure or RpcError(Status.CANCELLED, "the call was ended here")
        connection.close_stream(self)
        connection.flush()


_AnyStream = TypeVar("_AnyStream", ServerCall, _OtherRequest)


@functools.lru_cache(maxsize=256)
def _status_block(code: int, message: str, details: bytes) -> bytes:
    return header_block.encode(header_block.status_headers(code, message, details))
