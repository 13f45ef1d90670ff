"""The client end of a connection, and its calls."""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from contextlib import suppress

from bngrad_wire.fields import Buffer
from bngrad_wire.http2 import frames, header_block
from bngrad_wire.http2.block_decoder import HEADER_LIST_NBYTES, RESPONSE_PSEUDO_HEADERS, HeaderBlock
from bngrad_wire.http2.call import BaseCall, split_messages
from bngrad_wire.http2.connection import BaseConnection
from bngrad_wire.http2.errors import ErrorCode, PeerGoneError, RpcError, Status, error_of_http
from bngrad_wire.http2.sockets.receive_buffer import BUFFER_NBYTES
from bngrad_wire.http2.sockets.tls import TlsSocket
from bngrad_wire.http2.stream import Stream
from bngrad_wire.load_report import TEXT_HEADER

_SETTINGS = frames.settings(
    {
        frames.ENABLE_PUSH: 0,
        frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
        frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME_SIZE,
        frames.MAX_HEADER_LIST_SIZE: HEADER_LIST_NBYTES,
    }
)
_MAX_WHOLE_FRAMES = 8
_BUFFERED_NBYTES, _MAX_WHOLE_NBYTES = BUFFER_NBYTES - 4096, 2**18
"""The sizes of responses for which a large buffer is taken, so that they can be taken whole."""
_CALL_NBYTES = 4096
"""What a call earns the server, as if it had sent this much."""


class ClientConnection(BaseConnection):
    """A connection that makes calls, one after the other.

    Args:
        sock: A connected stream socket, which the connection owns from then on; its timeout bounds every wait.
        authority: The ``:authority`` of the calls, such as "localhost:50051".

    Attributes:
        load_text: What the server last said of its load, None once it was taken; see `bngrad_wire.load_report`.
        good_opening: The encoded headers of the last response that was accepted, if they always mean the same.
        good_trailers: Those that ended the last call with status OK, likewise.

    Raises:
        PeerGoneError: The peer has gone already.
    """

    _frames_per_reset = 0

    def __init__(self, sock: socket.socket, authority: str) -> None:
        super().__init__(sock, frames.PREFACE + _SETTINGS, RESPONSE_PSEUDO_HEADERS, frames.LARGEST_FRAME_SIZE)
        self._authority = authority
        self._scheme = "https" if isinstance(sock, TlsSocket) else "http"
        self._next_id = 1
        self.load_text: str | None = None
        self.good_opening = self.good_trailers = b""

    @property
    def is_idle(self) -> bool:
        """Whether a call can begin as far as is known; `usable` also looks whether the peer has gone."""
        if self.going_away or self._next_id > frames.MAX_STREAM_ID:
            return False
        return self.io.broken is None and self.stream is None

    @property
    def usable(self) -> bool:
        """Whether a call can begin: no error, no GOAWAY, no unfinished call, a number left, and the peer not gone."""
        if self.io.broken is None and self.stream is None and self.io.may_have_input:
            try:
                self.handle_available_frames()
            except (ConnectionError, TimeoutError):
                return False
        return self.is_idle

    def call(
        self, path: str, *, timeout_s: float | None = None, metadata: Sequence[tuple[str, str]] = ()
    ) -> ClientCall:
        """Begins a call; its headers are sent with the first message.

        Args:
            path: "/package.Service/Method".
            timeout_s: The deadline that the server is told, in seconds; this end is bounded by its socket's timeout.
            metadata: Lower-case names and printable ASCII values.

        Raises:
            PeerGoneError: The connection is not usable.
        """
        if self.stream is not None:
            raise PeerGoneError("the connection is unusable: the previous call is unfinished")
        self.io.check()
        if self.going_away or self._next_id > frames.MAX_STREAM_ID:
            raise PeerGoneError("the connection is unusable: the peer takes no more calls on it")
        block = _opening(self._scheme, path, self._authority)
        if timeout_s is not None:
            block += _timeout(timeout_s)
        if metadata:
            block += header_block.encode(metadata)
        call = ClientCall(self, self._next_id)
        self.last_stream_id = self._next_id
        self._next_id += 2
        self.stream = call
        self.earn(_CALL_NBYTES)
        self.append_headers(call.id, block, 0)
        return call

    def stream_opened(self, stream_id: int, block: HeaderBlock, end: bool) -> None:
        """Fails: push is disabled, so a server must not open streams."""
        self.connection_error(ErrorCode.PROTOCOL_ERROR, f"the server opened stream {stream_id}")

    def headers_received(self, stream: Stream, block: HeaderBlock, end: bool) -> None:
        """See `BaseConnection`."""
        assert isinstance(stream, ClientCall)
        stream.headers_received(block, end)

    @property
    def last_peer_stream_id(self) -> int:
        """Returns 0: a server opens no streams."""
        return 0

    def _handle_rst_stream(self, stream_id: int, code: int) -> None:
        """Ignores a reset after the whole response: the server needs no more of the request (RFC 9113, section 8.1)."""
        if self.stream is None or self.stream.id != stream_id or not self.stream.peer_ended:
            super()._handle_rst_stream(stream_id, code)

    def goaway_ends_call(self, last_stream_id: int) -> bool:
        """Returns whether the server will not handle the running call."""
        return self.stream is not None and self.stream.id > last_stream_id


class ClientCall(BaseCall):
    """A call as its client sees it; it has ended once `receive_message` returns None or raises `RpcError`."""

    _connection: ClientConnection
    lends_memory = True
    _lent_from_nbytes = 2 * 2**20

    def __init__(self, connection: ClientConnection, stream_id: int) -> None:
        super().__init__(connection, stream_id)
        self._headers_seen = False
        self._status_seen = False

    def half_close(self) -> None:
        """Ends the sending side without another message."""
        if not self._sending_ended and self._may_send():
            self._sending_ended = True
            self._connection.outbound.append(frames.frame_header(0, frames.DATA, frames.END_STREAM, self.id))
            self._connection.flush()

    def take_messages(self, nbytes: int = 0) -> list[Buffer] | None:
        """Takes the whole response if it is like earlier ones, which is cheaper than frame by frame.

        Most small ones arrive at once: headers, DATA, trailers with status OK. Waits for the rest of one whose
        beginning looks so.

        Args:
            nbytes: About how large the response will be, if that is known.

        Returns:
            The messages, after which the call has ended; or None, after which `receive_message` finds all as it was.

        Raises:
            Exception: As `receive_message`.
        """
        connection = self._connection
        io = connection.io
        if not self._sending_ended or not connection.is_between_frames:
            return None
        connection.flush()
        if _BUFFERED_NBYTES < nbytes <= _MAX_WHOLE_NBYTES:
            io.enlarge()
        io.fill_or_end(frames.HEADER_NBYTES)
        found = self._whole_response(io.buffer, io.low, io.high)
        while isinstance(found, int) and nbytes <= _MAX_WHOLE_NBYTES and found - io.low <= len(io.buffer):
            io.fill(found - io.low)
            found = self._whole_response(io.buffer, io.low, io.high)
        if found is None or isinstance(found, int):
            return None
        end, parts, frame_count, blocks_nbytes = found
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        messages = split_messages(memoryview(data))
        if messages is None or not connection.account_for_frames(self, frame_count, blocks_nbytes, len(data)):
            return None
        connection.acknowledge_received_data(len(data), None)
        io.low = end
        io.shrink()
        self.ended = self.peer_ended = True
        connection.stream = None
        return messages

    def _whole_response(self, buffer: bytearray, low: int, high: int) -> tuple[int, list[bytes], int, int] | int | None:
        """Finds a whole response: where it ends, the contents of DATA, how many frames it has, the size of blocks.

        Returns the offset up to which more must arrive if it may be one; None if it is not.
        """
        opening, trailers = self._connection.good_opening, self._connection.good_trailers
        opening_frame = frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, opening)
        trailers_frame = frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.id, trailers)
        if not opening or not trailers or not buffer.startswith(opening_frame, low, high):
            return None
        position = low + len(opening_frame)
        parts: list[bytes] = []
        view = memoryview(buffer)
        for count in range(2, _MAX_WHOLE_FRAMES + 1):
            if buffer.startswith(trailers_frame, position, high):
                return position + len(trailers_frame), parts, count, len(opening) + len(trailers)
            start = position + frames.HEADER_NBYTES
            if start > high:
                return start
            length, kind, flags, stream_id = frames.parse_header(buffer, position)
            position = start + length
            if kind != frames.DATA or flags or stream_id != self.id:
                return None
            if position > high:
                return position
            parts.append(bytes(view[start:position]))
        return None

    def cancel(self) -> None:
        """Cancels the call; the connection stays usable where its state is known. Never raises."""
        if self._connection.stream is self:
            self.ended = True
            self.failure = self.failure or RpcError(Status.CANCELLED, "the call was cancelled here")
            with suppress(ConnectionError, TimeoutError):
                self._reset(ErrorCode.CANCEL)

    def headers_received(self, block: HeaderBlock, end: bool) -> None:
        """Handles the response's headers or trailers."""
        headers = block.headers
        http = headers.get(":status")
        if block.is_too_large:
            reason = f"the server sent more than {HEADER_LIST_NBYTES} bytes of metadata"
            self.failure = RpcError(Status.RESOURCE_EXHAUSTED, reason)
        elif block.fault:
            self.failure = RpcError(Status.INTERNAL, f"the response is malformed: {block.fault}")
        elif not end and not self._headers_seen:
            if http is not None and http.startswith("1"):
                return
            self._headers_seen = True
            if http == "200" and headers.get("content-type", "").startswith(header_block.CONTENT_TYPE):
                self._connection.good_opening = block.encoded
                return
            self.failure = error_of_http(http or "missing")
        elif not end:
            reason = f"the trailers of stream {self.id} do not end it"
            self._connection.connection_error(ErrorCode.PROTOCOL_ERROR, reason)
        else:
            self.failure = header_block.parse_status(headers)
            self._status_seen = True
            if TEXT_HEADER in headers:
                self._connection.load_text = headers[TEXT_HEADER]
            elif self.failure is None:
                self._connection.good_trailers = block.encoded
        self.ended = True

    def _may_send(self) -> bool:
        if self.failure is not None and self._connection.stream is self:
            self._finish()  # so that the connection can be used again
        return super()._may_send() and not self.ended

    def _may_send_more(self) -> bool:
        self._connection.handle_available_frames()
        return self.failure is None and not self.ended  # Receiving says why, and ends the call.

    def _finish(self) -> None:
        if self.failure is None and not self._status_seen:
            self.failure = RpcError(Status.INTERNAL, "the call ended without a status")
        if not self.reset and not (self._sending_ended and self._status_seen):
            with suppress(ConnectionError, TimeoutError):  # the server may have gone after its last word
                self._reset(ErrorCode.NO_ERROR)
        self._connection.close_stream(self)
        super()._finish()

    def _reject_message(self) -> None:
        self.cancel()


@functools.lru_cache(maxsize=256)
def _opening(scheme: str, path: str, authority: str) -> bytes:
    """The headers with which every call of a method begins."""
    return header_block.encode(
        [
            (":method", "POST"),
            (":scheme", scheme),
            (":path", path),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", header_block.CONTENT_TYPE),
            ("user-agent", "bngrad"),
        ]
    )


@functools.lru_cache(maxsize=64)
def _timeout(timeout_s: float) -> bytes:
    return header_block.encode([("grpc-timeout", header_block.format_timeout(timeout_s))])
