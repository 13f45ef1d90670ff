"""The monitor's HTTP server, when many clients connect at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import ExitStack

import pytest

from bngrad_server.monitor import http


async def _answer(path: str, headers: Mapping[str, str]) -> http.Response:
    return http.text_response(200, path)


def test_a_request_that_is_there_outlasts_connections_that_come_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 16)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        first, *_ = (stack.enter_context(socket.create_connection(listener.getsockname(), 30)) for _ in range(80))
        first.sendall(b"GET /there HTTP/1.1\r\nHost: a\r\n\r\n")
        first.setblocking(False)

        async def receive() -> bytes:
            await http.HttpServer(_answer, lambda host: True).start(listener)
            return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(first, 65536), 30)

        assert asyncio.run(receive()).startswith(b"HTTP/1.1 200 ")
