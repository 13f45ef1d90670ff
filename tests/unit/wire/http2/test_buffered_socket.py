from __future__ import annotations

import socket

import pytest

from bngrad_wire.http2.buffered_socket import BufferedSocket


def congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize(("address", "is_own"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_large_messages_within_a_host_are_not_paced(address: str, is_own: bool) -> None:
    """Both ends have one address then; the system connects to 127.0.0.2 from 127.0.0.1."""
    with (
        socket.create_server((address, 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
    ):
        systems_choice = congestion_control(sock)
        buffered = BufferedSocket(sock)
        assert congestion_control(sock) == systems_choice
        buffered.expect_large_messages()
        assert congestion_control(sock) == (b"reno" if is_own else systems_choice)
