"""An HTTP/1.1 server by h11, with one request per connection, that bad clients cannot block.

A connection has 10 s for everything. With more than 128 connections, the oldest one that has not sent its request, or
not read its answer, is closed. So every client that does both gets an answer.
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
_TURNS_TO_READ = 6
"""More turns of the event loop than asyncio takes from a connection to the bytes that came with it."""
_MAX_HEAD_NBYTES = 16 * 1024
_MAX_SHOWN = 100
_WRONG_HOST = (
    "the Host header is {!r}; it should be an address, localhost, a name of this host or of its private network, "
    "or one that --http-names gives\n"
)


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
    """Answers GET and HEAD for hosts that may be asked for, see `bngrad_server.monitor.host_names`."""

    def __init__(self, handler: Handler, allows_host: Callable[[str], bool]) -> None:
        self._handler = handler
        self._allows_host = allows_host
        self._connections: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], None] = {}  # those that wait for their clients, the oldest first
        self._servers: list[asyncio.Server] = []

    async def start(self, listener: socket.socket) -> None:
        """Accepts connections from now on; may be called for several listening sockets."""
        self._servers.append(await asyncio.start_server(self._serve, sock=listener, limit=_MAX_HEAD_NBYTES))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self._waiting[task] = None
        self._make_room()
        try:
            await asyncio.wait_for(self._exchange(task, reader, writer), _TIMEOUT_S)
        except (asyncio.TimeoutError, asyncio.CancelledError, ConnectionError, h11.RemoteProtocolError):
            pass
        except Exception:
            logger.exception("a request over HTTP failed")
        finally:
            self._connections.discard(task)
            self._waiting.pop(task, None)
            writer.transport.abort()

    def _make_room(self, turns: int = _TURNS_TO_READ) -> None:
        """Closes the oldest connection if there are too many, after some turns of the event loop."""
        if len(self._connections) <= _MAX_CONNECTIONS:
            return
        if turns:
            asyncio.get_running_loop().call_soon(self._make_room, turns - 1)
        elif self._waiting:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._connections.discard(oldest)
            oldest.cancel()

    async def _exchange(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_NBYTES)
        try:
            request = await _receive_request(connection, reader)
            self._waiting.pop(task, None)
            response, has_body = await self._response(request)
            self._waiting[task] = None
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
        events = [head, *([h11.Data(data=response.body)] if has_body else []), h11.EndOfMessage()]
        # At once, since what ends the server may end this process between two writes.
        writer.write(b"".join(connection.send(event) or b"" for event in events))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _response(self, request: h11.Request) -> tuple[Response, bool]:
        """Returns the response to a request, and whether to send its body."""
        if request.method not in {b"GET", b"HEAD"}:
            return text_response(405, "only GET and HEAD are answered\n", {"allow": "GET, HEAD"}), True
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
        host = headers.get("host", "")  # which HTTP/1.0 may leave out; browsers do not
        path = request.target.decode("ascii").partition("?")[0]
        if path.startswith("http://"):  # as a proxy is asked; its host counts, see section 3.2.2 of RFC 9112
            host, _, path = path.removeprefix("http://").partition("/")
            path = f"/{path}"
        if not self._allows_host(host):
            return text_response(421, _WRONG_HOST.format(host[:_MAX_SHOWN])), True
        has_body = request.method == b"GET"
        try:
            return await self._handler(path, headers), has_body
        except Exception:
            logger.exception("a request for %s over HTTP failed", path)
            return text_response(500, "the server failed\n"), has_body


async def _receive_request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(_MAX_HEAD_NBYTES))
    if not isinstance(event, h11.Request):
        raise ConnectionError("the client has gone")
    return event
