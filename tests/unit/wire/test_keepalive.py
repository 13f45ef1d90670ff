"""Peers that are there, however little they do; `tests.fleet.test_lost_hosts` has those that are not."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import pytest

from bngrad_wire import keepalive


def test_a_peer_that_does_not_read_for_a_while_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # Linux sends probes after 0.2, 0.6, 1.4 and 3 s, and answers one in 0.5 s (tcp_invalid_ratelimit): the first two
    # may both get no answer.
    monkeypatch.setattr(keepalive, "_LOST_AFTER_MS", 1500)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        keepalive.enable(sock)
        sock.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sock.send(bytes(2**20))
        until = time.monotonic() + 4
        while time.monotonic() < until:
            assert not keepalive.is_lost(sock)
            time.sleep(0.01)


def test_an_idle_peer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "_LOST_AFTER_MS", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        assert not keepalive.is_lost(sock)


def test_a_peer_of_which_the_system_tells_little_is_not_lost() -> None:
    class Emulated(socket.socket):
        def getsockopt(self, *_: int) -> bytes:  # type: ignore[override]
            return bytes(4)

    with Emulated() as sock:
        assert not keepalive.is_lost(sock)
