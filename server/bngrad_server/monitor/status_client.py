"""Asks the front process for its status, from the HTTP process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from typing import Any

_FRESH_S = 0.2
_TIMEOUT_S = 4.0
_MAX_PACKET_NBYTES = 1 << 20


class FrontGoneError(Exception):
    """The front process has closed the socket."""


class StatusClient:
    """Asks the front process for the server's status, and caches it for 0.2 s."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._asking: asyncio.Task[None] | None = None
        self._status: dict[str, Any] = {}
        self._asked_at = float("-inf")

    async def status(self) -> dict[str, Any]:
        """Returns the server's status; see `bngrad_server.server.Server.status`.

        Raises:
            TimeoutError: The front process does not answer within 4 s.
            FrontGoneError: It has closed the socket.
        """
        if time.monotonic() - self._asked_at > _FRESH_S:
            # Requests that come meanwhile share the answer: a second question could take too long.
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_in_time())
            await asyncio.shield(self._asking)
        return self._status

    async def _ask_in_time(self) -> None:
        try:
            self._status = json.loads(await asyncio.wait_for(self._ask(), _TIMEOUT_S))
        except asyncio.TimeoutError as error:  # another class in Python 3.10
            raise TimeoutError from error
        self._asked_at = time.monotonic()

    async def _ask(self) -> bytes:
        with contextlib.suppress(BlockingIOError):  # drops an answer that came too late
            while self._socket.recv(_MAX_PACKET_NBYTES):
                pass
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._socket, b"?")
            answer = await loop.sock_recv(self._socket, _MAX_PACKET_NBYTES)
        except ConnectionError as error:
            raise FrontGoneError from error
        if not answer:
            raise FrontGoneError
        return answer
