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


async def _fail(path: str, headers: Mapping[str, str]) -> http.Response:
    raise ZeroDivisionError


async def _answer_of(handler: http.Handler, listener: socket.socket, client: socket.socket) -> bytes:
    """Serves, and returns what a client receives first."""
    client.setblocking(False)
    await http.HttpServer(handler, lambda host: host == "a").start(listener)
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 65536), 30)


def test_a_request_that_is_there_outlasts_connections_that_come_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 16)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        first, *_ = (stack.enter_context(socket.create_connection(listener.getsockname(), 30)) for _ in range(80))
        first.sendall(b"GET /there HTTP/1.1\r\nHost: a\r\n\r\n")
        assert asyncio.run(_answer_of(_answer, listener, first)).startswith(b"HTTP/1.1 200 ")


def test_an_unexpected_error_is_answered() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), 30) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert asyncio.run(_answer_of(_fail, listener, client)).startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/metrics", "/metrics"),
        ("/metrics?x=1", "/metrics"),
        ("http://a/metrics", "/metrics"),
        ("http://a/metrics?x=1", "/metrics"),
        ("http://a", "/"),
    ],
)
def test_a_path_is_found_in_every_form_of_a_request(target: str, path: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), 30) as client,
    ):
        host = "b" if "://" in target else "a"  # that of the target counts
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert asyncio.run(_answer_of(_answer, listener, client)).endswith(f"\r\n\r\n{path}".encode())
