"""An HTTP/1.1 server by h11, with one request per connection, that bad clients cannot block.

A connection has 10 s for everything, and beyond 128 connections the oldest is closed, so every client that sends its
request and reads its answer gets one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import h11

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
"""Longer than `StatusClient` waits for the front process, so that a client still gets the error."""
_MAX_CONNECTIONS = 128
_MAX_HEAD_NBYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Response:
    """A response: the status code, the media type of the body, the body and further headers."""

    status: int
    media_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[str, Mapping[str, str]], Awaitable[Response]]
"""Handles a GET; gets the path without its query, and the headers by their lower-case names."""


def text_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Makes a response of plain text."""
    return Response(status, "text/plain; charset=utf-8", text.encode(), headers or {})


class HttpServer:
    """Answers GET and HEAD."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: dict[asyncio.Task[None], None] = {}  # in the order of their age
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accepts connections from now on."""
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=_MAX_HEAD_NBYTES)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        if len(self._connections) > _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        try:
            await asyncio.wait_for(self._exchange(reader, writer), _TIMEOUT_S)
        except (asyncio.TimeoutError, asyncio.CancelledError, ConnectionError, h11.RemoteProtocolError):
            pass
        except Exception:
            logger.exception("a request over HTTP failed")
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_NBYTES)
        try:
            response, has_body = await self._response(connection, reader)
        except h11.RemoteProtocolError as error:
            response, has_body = text_response(error.error_status_hint, "the request is not HTTP/1.1\n"), True
        headers = {
            "content-type": response.media_type,
            "content-length": str(len(response.body)),
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            "connection": "close",
            **response.headers,
        }
        reason = HTTPStatus(response.status).phrase
        head = h11.Response(status_code=response.status, headers=list(headers.items()), reason=reason)
        writer.write(connection.send(head) or b"")
        if has_body:
            writer.write(connection.send(h11.Data(data=response.body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _response(self, connection: h11.Connection, reader: asyncio.StreamReader) -> tuple[Response, bool]:
        """Returns the response to the next request, and whether to send its body."""
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await reader.read(_MAX_HEAD_NBYTES))
        if not isinstance(event, h11.Request):
            raise ConnectionError("the client has gone")
        if event.method not in {b"GET", b"HEAD"}:
            return text_response(405, "only GET and HEAD are answered\n", {"allow": "GET, HEAD"}), True
        path = event.target.decode("ascii").partition("?")[0]
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        return await self._handler(path, headers), event.method == b"GET"
