"""The HTTP process, run as ``python -m bngrad_server.monitor SOCKET_FD LISTENER_FD FRONT_PID HOST_NAMES``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

from bngrad_server.monitor.history import History
from bngrad_server.monitor.host_names import HostNames
from bngrad_server.monitor.http import HttpServer
from bngrad_server.monitor.pages import Pages
from bngrad_server.monitor.status_client import FrontGoneError, StatusClient
from bngrad_server.runtime.processes import die_with_parent, ignore_stop_signals
from bngrad_server.telemetry import logs

_SAMPLE_S = 1.0
_NICENESS = 5
"""Computing has priority."""


def main() -> None:
    """Serves until the front process closes the socket."""
    socket_fd, listener_fd, front_pid = map(int, sys.argv[1:4])
    host_names = HostNames(sys.argv[4].split(","))
    die_with_parent(front_pid)
    ignore_stop_signals()
    logs.set_up_as_parent()
    os.nice(_NICENESS)
    with (
        socket.socket(fileno=socket_fd) as front,
        socket.socket(fileno=listener_fd) as listener,
        contextlib.suppress(FrontGoneError),
    ):
        asyncio.run(_serve(StatusClient(front), listener, front_pid, host_names))


async def _serve(front: StatusClient, listener: socket.socket, front_pid: int, host_names: HostNames) -> None:
    history = History()
    http = HttpServer(Pages(front, history, front_pid).answer, host_names.allows)
    await http.start(listener)
    while True:
        with contextlib.suppress(TimeoutError):
            history.add(await front.status())
        await asyncio.sleep(_SAMPLE_S)


if __name__ == "__main__":
    main()
