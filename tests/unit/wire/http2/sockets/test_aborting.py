"""Connections that are ended while their peers wait."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest

from bngrad_wire import http2

TIMEOUT_S = 10.0


def test_a_connection_that_is_closed_already_can_be_aborted() -> None:
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.close()
    http2.abort(near)


def test_a_client_that_waits_for_room_to_send_learns_that_its_connection_was_aborted() -> None:
    """Although a thread reads what had arrived before it closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server = listener.accept()[0]
    with client:
        with server:
            client.settimeout(0.5)
            with suppress(TimeoutError):
                while True:
                    client.send(bytes(2**16))
            http2.abort(server)
            while server.recv(2**16):
                pass
        client.settimeout(TIMEOUT_S)
        with pytest.raises(ConnectionError):
            client.sendall(bytes(2**24))
