"""The server end of a connection, and its calls."""

from __future__ import annotations

import functools
import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from bngrad_wire.http2 import frames, header_block
from bngrad_wire.http2.block_decoder import HEADER_LIST_NBYTES, REQUEST_PSEUDO_HEADERS, HeaderBlock
from bngrad_wire.http2.buffered_socket import BUFFER_NBYTES, LARGE_BUFFER_NBYTES
from bngrad_wire.http2.call import PREFIX, BaseCall, split_messages
from bngrad_wire.http2.connection import BaseConnection
from bngrad_wire.http2.connection_state import Stream
from bngrad_wire.http2.errors import EndOfConnectionError, ErrorCode, RpcError, Status

_SETTINGS = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: 1,
        frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: HEADER_LIST_NBYTES,
    }
)
_LARGE_FRAMES = frames.settings({frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME_SIZE})
_MAX_WHOLE_NBYTES = LARGE_BUFFER_NBYTES - BUFFER_NBYTES
"""Of a call for which a large buffer is taken."""
_REST_TIMEOUT_S = 0.01
"""How long the rest of a call is awaited, so that it can be taken whole."""
_ANSWER_NBYTES = 2048
"""What a message of an answer earns its client, as if it had sent this much more."""
_RESPONSE = [(":status", "200"), ("content-type", header_block.CONTENT_TYPE)]
_RESPONSE_BLOCK = header_block.encode(_RESPONSE)
_OK_BLOCK = header_block.encode(header_block.status_headers(0, "", b""))
_ENDED_HERE = RpcError(Status.CANCELLED, "the call was ended here")
"""The failure of every ended call, which raises copies of it: an error takes long to make."""
_CONTENT_LENGTH = re.compile("[0-9]{1,18}")
_NOT_GRPC_BLOCK = header_block.encode([(":status", "415"), ("content-type", "text/plain")])
_NOT_GRPC_TEXT = b"This port serves gRPC: POST with content-type application/grpc.\n"


class CallHeaders(NamedTuple):
    """What the headers of a call say; see `ServerCall`. With a fault, they are malformed."""

    path: str
    timeout_s: float | None
    metadata: Mapping[str, str]
    fault: str = ""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> CallHeaders:
        """Reads the headers that gRPC defines."""
        timeout_s, fault = None, ""
        if (timeout := headers.get("grpc-timeout")) is not None:
            try:
                timeout_s = header_block.parse_timeout(timeout)
            except ValueError as error:
                fault = str(error)
        metadata = {name: value for name, value in headers.items() if not name.startswith(":")}
        return cls(headers.get(":path", ""), timeout_s, metadata, fault)


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
        self._good_block: HeaderBlock | None = None
        self._headers = CallHeaders("", None, {})
        self._last_nbytes = 0  # of the last call's DATA
        self._is_rest_missing = False  # of the call that begins the buffer
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
            if BUFFER_NBYTES < self._last_nbytes < _MAX_WHOLE_NBYTES and self.stream is None:
                io.enlarge()
            io.fill_nonblocking()
        if self.stream is None:
            call = self._take_whole_call()
            if call is not None or self._may_await_rest():
                return call
        if self._take_preface():
            self.handle_buffered_frames()
        io.shrink()
        return self.stream if isinstance(self.stream, ServerCall) else None

    @property
    def awaits_rest(self) -> bool:
        """Whether the input that is buffered waits for more, or for a time out of which `accept_nonblocking` finds."""
        return self._is_rest_missing

    def _may_await_rest(self) -> bool:
        """Whether a call has begun to arrive that may be taken whole soon, so that none of it is handled before."""
        if not self._is_rest_missing:
            self._rest_until = 0.0
            return False
        now = time.monotonic()
        self._rest_until = self._rest_until or now + _REST_TIMEOUT_S
        self._is_rest_missing = now < self._rest_until
        return self._is_rest_missing

    def _take_whole_call(self) -> ServerCall | None:
        """Takes a call that has arrived whole and begins like the one before, at less cost than frame by frame.

        Accounts for its frames all the same. Returns None, and takes nothing, if what comes next is anything else.
        """
        io = self.io
        self._is_rest_missing = False
        start = io.low + frames.HEADER_NBYTES
        if start > io.high or self._sent_goaway or not self.is_before_call:
            return None
        length, kind, flags, stream_id = frames.parse_header(io.buffer, io.low)
        end = start + length
        if kind != frames.HEADERS or flags != frames.END_HEADERS or end > io.high:
            return None
        block = self.known_block(bytes(io.buffer[start:end]))
        if block is None or block is not self._good_block or not self._is_next_stream(stream_id):
            return None
        whole = frames.find_data(io.buffer, end, io.high, stream_id)
        if whole is None or isinstance(whole, int):
            self._is_rest_missing = whole is not None and io.is_large and whole - io.low <= LARGE_BUFFER_NBYTES
            return None
        data, frame_count, end = whole
        call = ServerCall(self, stream_id, self._headers)
        self.stream = call
        if not self.accept_whole(frame_count + 1, length, len(data)):
            self.stream = None
            return None
        io.low = end
        io.shrink()
        self.last_stream_id = stream_id
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
        return io.high > io.low and self._preface_seen and not self._is_rest_missing and self._is_next_ready()

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

    def close_stream(self, stream: Stream) -> None:
        """Closes a stream on this side, and notes how much DATA the client has sent on it."""
        self._last_nbytes = frames.MAX_WINDOW - stream.receive_window
        super().close_stream(stream)

    def stream_opened(self, stream_id: int, block: HeaderBlock, end: bool) -> None:
        """Begins a call with the header block; refuses it while another call runs, and after `goaway`."""
        self.last_stream_id = stream_id
        if self.stream is not None or self._sent_goaway:
            self._refuse_stream(stream_id, ErrorCode.REFUSED_STREAM, end)
        elif block.is_too_large:
            reason = f"the metadata has more than {HEADER_LIST_NBYTES} bytes"
            call = self._begin(ServerCall(self, stream_id, CallHeaders("", None, {})), end)
            call.end(Status.RESOURCE_EXHAUSTED, reason)
        elif block.fault or not block.is_opening or not _has_valid_length(block.headers, end):
            self._refuse_stream(stream_id, ErrorCode.PROTOCOL_ERROR, end)
        elif _is_grpc(block.headers):
            self._begin_call(stream_id, block, end)
        else:
            self._begin(_OtherRequest(self, stream_id, block.headers), end).progressed()

    def _begin_call(self, stream_id: int, block: HeaderBlock, end: bool) -> None:
        headers = CallHeaders.of(block.headers)
        call = self._begin(ServerCall(self, stream_id, headers), end)
        if headers.fault:
            call.end(Status.INTERNAL, headers.fault)
        elif "content-length" in block.headers:
            call.content_left = _content_left(block.headers)
        else:
            self._good_block, self._headers = block, headers

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
        self._text = b"" if headers[":method"] == "HEAD" else _NOT_GRPC_TEXT
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
                connection.append_headers(self.id, _NOT_GRPC_BLOCK, 0 if self._text else frames.END_STREAM)
            room = min(len(self._text), self.send_window, connection.send_window)
            if room > 0:
                part, self._text = self._text[:room], self._text[room:]
                self.send_window -= room
                connection.send_window -= room
                end = 0 if self._text else frames.END_STREAM
                connection.outbound.append(frames.frame(frames.DATA, end, self.id, part))
            connection.flush()
        if self.failure is not None or (self._headers_sent and not self._text):
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

    def __init__(self, connection: ServerConnection, stream_id: int, headers: CallHeaders) -> None:
        super().__init__(connection, stream_id)
        self.path, self.timeout_s, self.metadata, _ = headers
        self._headers_sent = False

    def received_messages(self) -> list[bytearray] | None:
        """Returns the messages of a call that has arrived whole and that nothing was read of, without reading them.

        None if it has not arrived whole, or a message is compressed or cut off.
        """
        return split_messages(self.receive_buffer) if self.is_fully_received else None

    def answer(self, messages: Sequence[bytes], trailers: bytes = b"") -> None:
        """Sends the whole response, of some short messages, and ends the call with status OK; see `end`.

        What was not read of the call counts as read.
        """
        connection = self._connection
        size = sum(map(len, messages)) + len(messages) * PREFIX.size
        is_plain = not (self._headers_sent or connection.table_size_update or self.failure is not None)
        if is_plain and self.ended and size <= min(frames.MIN_FRAME_SIZE, self.send_window, connection.send_window):
            connection.send_window -= size
            connection.earn(_ANSWER_NBYTES)
            connection.outbound.append(_whole_response(self.id, messages, trailers))
            self.failure = _ENDED_HERE
            connection.close_stream(self)
            connection.flush()
            return
        for message in messages:
            self.send_message(message, more=True)
        self.end(trailers=trailers)

    def headers_received(self, block: HeaderBlock, end: bool) -> None:
        """Handles the client's trailers, whose contents are ignored."""
        _check_trailers(self._connection, self, block, end)
        self.ended = True

    def _expect_large_message(self) -> None:
        self._connection.allow_large_frames()

    def _begin_message(self) -> None:
        self._connection.earn(_ANSWER_NBYTES)
        if not self._headers_sent:
            self._headers_sent = True
            self._connection.append_headers(self.id, _RESPONSE_BLOCK, 0)

    def end(self, code: int = 0, message: str = "", details: bytes = b"", *, trailers: bytes = b"") -> None:
        """Ends the call with a status; does nothing if it has ended or the client has reset it.

        Args:
            code: gRPC's status code; 0 is OK.
            message: What went wrong; any text.
            details: A serialised ``google.rpc.Status``.
            trailers: More trailers, as `bngrad_wire.http2.header_block.encode` encodes them.

        Raises:
            PeerGoneError: The connection is gone.
            TimeoutError: The socket's timeout passed.
        """
        block = _OK_BLOCK
        if code or message or details:
            block = _status_block(code, message, details)
        block += trailers
        connection = self._connection
        if connection.stream is not self:
            return
        if self.failure is None and not self.ended:
            connection.handle_available_frames()
        if self.failure is None:
            if not self._headers_sent:
                block = _RESPONSE_BLOCK + block
            connection.append_headers(self.id, block, frames.END_STREAM)
            if not self.ended:
                connection.outbound.append(frames.rst_stream(self.id, ErrorCode.NO_ERROR))
        self.failure = self.failure or _ENDED_HERE
        connection.close_stream(self)
        connection.flush()


_AnyStream = TypeVar("_AnyStream", ServerCall, _OtherRequest)


def _whole_response(stream_id: int, messages: Sequence[bytes], trailers: bytes) -> bytes:
    """The frames of a response with status OK."""
    size = sum(map(len, messages)) + len(messages) * PREFIX.size
    pieces = [
        frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, _RESPONSE_BLOCK),
        frames.frame_header(size, frames.DATA, 0, stream_id),
    ]
    for message in messages:
        pieces += (PREFIX.pack(0, len(message)), message)
    pieces.append(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream_id, _OK_BLOCK + trailers))
    return b"".join(pieces)


@functools.lru_cache(maxsize=256)
def _status_block(code: int, message: str, details: bytes) -> bytes:
    return header_block.encode(header_block.status_headers(code, message, details))
