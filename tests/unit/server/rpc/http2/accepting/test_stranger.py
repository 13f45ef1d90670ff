"""A connection before its first call."""

from __future__ import annotations

import socket

from bngrad_server.rpc.http2.accepting.stranger import Stranger
from bngrad_wire.http2 import MultiplexedConnection, frames

PING = frames.frame(frames.PING, 0, 0, bytes(8))


def test_what_was_received_and_not_handled_yet_is_unread() -> None:
    near, far = socket.socketpair()
    with far:
        http = MultiplexedConnection(near)
        http.blocking = False
        stranger = Stranger(near, "somebody", http)
        assert not stranger.is_unread
        far.sendall(frames.PREFACE + frames.settings({}) + PING * 100)
        assert stranger.is_unread
        assert http.accept_nonblocking() is None
        assert stranger.is_unread  # though the socket has nothing more
        assert http.accept_nonblocking() is None
        assert not stranger.is_unread
        http.close()


def test_a_stranger_has_left_when_it_has_closed_the_connection_though_not_all_was_read() -> None:
    near, far = socket.socketpair()
    with near, far:
        stranger = Stranger(near, "somebody")
        far.sendall(PING)
        assert not stranger.has_left
        far.shutdown(socket.SHUT_WR)
        assert stranger.has_left
