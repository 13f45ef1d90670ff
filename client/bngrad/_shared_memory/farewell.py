"""The end of a call that came to nothing: whether its server has heard of it."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

from bngrad_wire.http2 import frames

_PING = frames.frame(frames.PING, 0, 0, bytes(8))


class Farewell:
    """Keeps the Unix socket of a call that its client gave up, until the server has closed its end.

    A server that is slow may not have read the call yet, and would begin it later. Once it has closed its end it has
    either begun the call or never will.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def say(self, sock: socket.socket) -> None:
        """Has the server close its end of a connection, whose socket this takes over."""
        with suppress(OSError):
            sock.setblocking(False)
            if _is_silenced(sock):
                sock.send(_PING)  # what it answers finds nobody, which is how it learns that the client has gone
            else:
                sock.shutdown(socket.SHUT_WR)
        if sock.fileno() >= 0:  # else the server has broken the protocol, and it was closed for that
            self._socket = sock

    def is_heard(self) -> bool:
        """Whether the server has closed its end, or there was nothing to say."""
        if self._socket is not None:
            poll = select.poll()
            poll.register(self._socket, 0)  # a hang-up is always told: both directions have ended
            if not poll.poll(0):
                return False
            self.close()
        return True

    def close(self) -> None:
        """Waits for the server no longer."""
        sock, self._socket = self._socket, None  # first of all: Ctrl-C may come between any two steps
        if sock is not None:
            sock.close()


def silence(sock: socket.socket) -> None:
    """Ends what waits for an answer on a Unix socket, from any thread; `Farewell` is left to be said on it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RD)


def _is_silenced(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return any(events & select.POLLRDHUP for _, events in poll.poll(0))
