"""TCP ports for servers that cannot choose one by themselves."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Returns a port that was free on 127.0.0.1 a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
