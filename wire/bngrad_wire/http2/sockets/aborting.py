"""Ends connections at once, whatever their threads wait for."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_RESET = struct.pack("ii", 1, 0)
"""For SO_LINGER: closing sends an RST."""


def abort(sock: socket.socket) -> None:
    """Ends a connection from any thread; the thread that uses it sees it broken.

    Closing it then resets it. Else a peer that waits for room to send, while the thread reads the rest, would not learn
    of it: what is read after a shutdown makes no room. And a server would wait a minute for us to read its answer.
    """
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.shutdown(socket.SHUT_RDWR)
