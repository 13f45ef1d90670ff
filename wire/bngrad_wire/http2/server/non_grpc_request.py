"""A request that is not gRPC, such as a browser's, and its response."""

from __future__ import annotations

from bngrad_wire.http2 import frames, header_block
from bngrad_wire.http2.connection import BaseConnection
from bngrad_wire.http2.server.request_headers import content_length
from bngrad_wire.http2.stream import Stream

_HEADERS = header_block.encode([(":status", "415"), ("content-type", "text/plain")])
_TEXT = b"This port serves gRPC: POST with content-type application/grpc.\n"


class NonGrpcRequest(Stream):
    """A request that is not gRPC: what it brings is discarded, and it is answered as the client's windows allow."""

    def __init__(self, connection: BaseConnection, stream_id: int, headers: dict[str, str]) -> None:
        super().__init__(stream_id, connection.initial_send_window)
        self.ended = True
        self.content_left = content_length(headers)
        self._connection = connection
        self._text = b"" if headers[":method"] == "HEAD" else _TEXT
        self._headers_sent = False

    def progressed(self) -> None:
        """Sends what the windows allow."""
        connection = self._connection
        if self.failure is None and self.peer_ended:
            if not self._headers_sent:
                self._headers_sent = True
                connection.append_headers(self.id, _HEADERS, 0 if self._text else frames.END_STREAM)
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
