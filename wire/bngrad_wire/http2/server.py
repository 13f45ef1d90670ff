"""The server end of a connection, and its calls."""

from __future__ import annotations

import functools
import socket

from bngrad_wire.http2 import frames, header_block
from bngrad_wire.http2.call import BaseCall
from bngrad_wire.http2.connection import BaseConnection
from bngrad_wire.http2.errors import EndOfConnectionError, ErrorCode, RpcError, Status

_SETTINGS = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: 1,
        frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
        frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME_SIZE,
        frames.MAX_HEADER_LIST_SIZE: header_block.HEADER_LIST_NBYTES,
    }
)
_RESPONSE = [(":status", "200"), ("content-type", header_block.CONTENT_TYPE)]
_RESPONSE_BLOCK = header_block.encode(_RESPONSE)
_OK_BLOCK = header_block.encode(header_block.status_headers(0, "", b""))
_NOT_GRPC_BLOCK = header_block.encode([(":status", "415")])


class ServerConnection(BaseConnection):
    """A connection that accepts calls, one after the other.

    Args:
        sock: An accepted stream socket, which the connection owns from then on; its timeout bounds every wait.

    Raises:
        PeerGoneError: The peer has gone already.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, _SETTINGS)
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
        """Handles what has arrived, with one system call and without waiting, and returns the running call, if any.

        For an event loop with many connections. What it sends waits only where `blocking` is true.

        Raises:
            PeerGoneError: The client has closed or reset the connection.
            ProtocolError: The client broke the protocol.
        """
        self.io.fill_nonblocking()
        if self._take_preface():
            self.handle_buffered_frames()
        return self.stream if isinstance(self.stream, ServerCall) else None

    def accept_partial(self) -> ServerCall | None:
        """Waits for the rest of a frame that has begun to arrive; returns the call, if it begins one.

        Raises:
            ConnectionError: The client has gone or broke the protocol.
            TimeoutError: The socket's timeout passed.
        """
        self.flush()
        while self.stream is None and self.has_pending_input:
            if self._preface_seen:
                self.handle_frame()
            else:
                self._read_preface()
        return self.stream if isinstance(self.stream, ServerCall) else None

    @property
    def has_pending_input(self) -> bool:
        """Whether bytes have arrived that are not handled yet, such as a part of a frame."""
        io = self.io
        return io.high > io.low or (io.tls is not None and io.tls.pending() > 0)

    @property
    def needs_blocking_read(self) -> bool:
        """Whether the frame that has begun to arrive may take long, or does not fit the buffer."""
        return self._preface_seen and not self._is_short_frame()

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

    def stream_opened(self, stream_id: int, headers: dict[str, str], end: bool) -> None:
        """Begins a call with the header block; refuses it while another call runs, and after `goaway`."""
        self.last_stream_id = stream_id
        if self.stream is not None or self._sent_goaway:
            self.count_idle_frame()
            self.send_control(frames.rst_stream(stream_id, ErrorCode.REFUSED_STREAM))
            return
        call = ServerCall(self, stream_id, headers)
        call.ended = end
        self.stream = call
        content_type = headers.get("content-type", "")
        if headers.get(":method") != "POST" or not content_type.startswith(header_block.CONTENT_TYPE):
            call.end_with(_NOT_GRPC_BLOCK)
        elif not call.path:
            call.end(Status.INTERNAL, "the call has no :path")
        elif "grpc-timeout" in headers:
            try:
                call.timeout_s = header_block.parse_timeout(headers["grpc-timeout"])
            except ValueError as error:
                call.end(Status.INTERNAL, str(error))

    def goaway_ends_call(self, last_stream_id: int) -> bool:
        """Returns False: the running call was opened by the client itself."""
        return False


class ServerCall(BaseCall):
    """A call as its server sees it, until `end`.

    Attributes:
        path: "/package.Service/Method".
        timeout_s: The client's deadline, in seconds from the start of the call; None is no limit.
        metadata: All headers except pseudo-headers; binary ones are still in base64.
    """

    def __init__(self, connection: BaseConnection, stream_id: int, headers: dict[str, str]) -> None:
        super().__init__(connection, stream_id)
        self.path = headers.get(":path", "")
        self.timeout_s: float | None = None
        self.metadata = {name: value for name, value in headers.items() if not name.startswith(":")}
        self._headers_sent = False

    def headers_received(self, headers: dict[str, str], end: bool) -> None:
        """Handles the client's trailers, whose contents are ignored."""
        if not end:
            self._connection.connection_error(ErrorCode.PROTOCOL_ERROR, f"a second header block on stream {self.id}")
        self.ended = True

    def _send_headers_once(self) -> None:
        if not self._headers_sent:
            self._headers_sent = True
            self._append_headers(_RESPONSE_BLOCK, 0)

    def _append_headers(self, block: bytes, flags: int) -> None:
        connection = self._connection
        if connection.table_size_update:
            block, connection.table_size_update = connection.table_size_update + block, b""
        connection.outbound += frames.header_block(self.id, block, flags)

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
        self.end_with(block if self._headers_sent else _RESPONSE_BLOCK + block)

    def end_with(self, block: bytes) -> None:
        """Ends the call with an encoded header block."""
        connection = self._connection
        if connection.stream is not self:
            return
        if self.failure is None and not self.ended:
            connection.handle_available_frames()
        if self.failure is None:
            self._append_headers(block, frames.END_STREAM)
            if not self.ended:
                connection.outbound.append(frames.rst_stream(self.id, ErrorCode.NO_ERROR))
        self.failure = self.failure or RpcError(Status.CANCELLED, "the call was ended here")
        connection.close_stream(self)
        connection.flush()


@functools.lru_cache(maxsize=256)
def _status_block(code: int, message: str, details: bytes) -> bytes:
    return header_block.encode(header_block.status_headers(code, message, details))
