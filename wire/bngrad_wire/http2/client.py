"""The client end of a connection, and its calls."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from bngrad_wire.http2 import frames, header_block
from bngrad_wire.http2.block_decoder import HEADER_LIST_NBYTES, RESPONSE_PSEUDO_HEADERS, HeaderBlock
from bngrad_wire.http2.call import BaseCall
from bngrad_wire.http2.connection import BaseConnection
from bngrad_wire.http2.errors import ErrorCode, PeerGoneError, RpcError, Status, error_of_http
from bngrad_wire.http2.tls import TlsSocket

_SETTINGS = frames.settings(
    {
        frames.ENABLE_PUSH: 0,
        frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
        frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME_SIZE,
        frames.MAX_HEADER_LIST_SIZE: HEADER_LIST_NBYTES,
    }
)
_CALL_NBYTES = 4096
"""What a call earns the server, as if it had sent this much."""


class ClientConnection(BaseConnection):
    """A connection that makes calls, one after the other.

    Args:
        sock: A connected stream socket, which the connection owns from then on; its timeout bounds every wait.
        authority: The ``:authority`` of the calls, such as "localhost:50051".

    Raises:
        PeerGoneError: The peer has gone already.
    """

    _frames_per_reset = 0

    def __init__(self, sock: socket.socket, authority: str) -> None:
        super().__init__(sock, frames.PREFACE + _SETTINGS, RESPONSE_PSEUDO_HEADERS, frames.LARGEST_FRAME_SIZE)
        self._authority = authority
        self._scheme = "https" if isinstance(sock, TlsSocket) else "http"
        self._blocks: dict[str, bytes] = {}
        self._next_id = 1

    @property
    def usable(self) -> bool:
        """Whether a call can begin: no error, no GOAWAY, no unfinished call, and the peer has not gone."""
        if self.io.broken is None and self.stream is None:
            try:
                self.handle_available_frames()
            except (ConnectionError, TimeoutError):
                return False
        return self.io.broken is None and self.stream is None and not self.going_away

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
        block = self._blocks.get(path)
        if block is None:
            block = self._blocks[path] = header_block.encode(
                [
                    (":method", "POST"),
                    (":scheme", self._scheme),
                    (":path", path),
                    (":authority", self._authority),
                    ("te", "trailers"),
                    ("content-type", header_block.CONTENT_TYPE),
                    ("user-agent", "bngrad"),
                ]
            )
        if timeout_s is not None:
            block += header_block.encode([("grpc-timeout", header_block.format_timeout(timeout_s))])
        if metadata:
            block += header_block.encode(metadata)
        if self.table_size_update:
            block, self.table_size_update = self.table_size_update + block, b""
        call = ClientCall(self, self._next_id)
        self.last_stream_id = self._next_id
        self._next_id += 2
        self.stream = call
        self.earn(_CALL_NBYTES)
        self.outbound += frames.header_block(call.id, block, 0)
        return call

    def stream_opened(self, stream_id: int, block: HeaderBlock, end: bool) -> None:
        """Fails: push is disabled, so a server must not open streams."""
        self.connection_error(ErrorCode.PROTOCOL_ERROR, f"the server opened stream {stream_id}")

    def goaway_ends_call(self, last_stream_id: int) -> bool:
        """Returns whether the server will not handle the running call."""
        return self.stream is not None and self.stream.id > last_stream_id


class ClientCall(BaseCall):
    """A call as its client sees it; it has ended once `receive_message` returns None or raises `RpcError`."""

    def __init__(self, connection: BaseConnection, stream_id: int) -> None:
        super().__init__(connection, stream_id)
        self._headers_seen = False
        self._status_seen = False

    def half_close(self) -> None:
        """Ends the sending side without another message."""
        if not self._sending_ended and self._may_send():
            self._sending_ended = True
            self._connection.outbound.append(frames.frame_header(0, frames.DATA, frames.END_STREAM, self.id))
            self._connection.flush()

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
                return
            self.failure = error_of_http(http or "missing")
        elif not end:
            reason = f"the trailers of stream {self.id} do not end it"
            self._connection.connection_error(ErrorCode.PROTOCOL_ERROR, reason)
        else:
            self.failure = header_block.parse_status(headers)
            self._status_seen = True
        self.ended = True

    def _may_send(self) -> bool:
        return super()._may_send() and not self.ended

    def _may_send_more(self) -> bool:
        self._connection.handle_available_frames()
        return self.failure is None and not self.ended  # Receiving says why, and ends the call.

    def _finish(self) -> None:
        if self.failure is None and not self._status_seen:
            self.failure = RpcError(Status.INTERNAL, "the call ended without a status")
        if not self.reset and not (self._sending_ended and self._status_seen):
            self._reset(ErrorCode.NO_ERROR)
        self._connection.close_stream(self)
        super()._finish()

    def _reject_message(self) -> None:
        self.cancel()
