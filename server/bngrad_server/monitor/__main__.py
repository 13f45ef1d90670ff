"""The HTTP process, run as ``python -m bngrad_server.monitor SOCKET_FD FRONT_PID HOST_NAMES LISTENER_FD...``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence

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
    socket_fd, pid, names, *listener_fds = sys.argv[1:]
    front_pid = int(pid)
    die_with_parent(front_pid)
    ignore_stop_signals()
    logs.set_up_as_parent()
    os.nice(_NICENESS)
    front, *listeners = (socket.socket(fileno=int(fd)) for fd in (socket_fd, *listener_fds))
    with contextlib.suppress(FrontGoneError):
        asyncio.run(_serve(StatusClient(front), listeners, front_pid, HostNames(names.split(","))))


async def _serve(
    front: StatusClient, listeners: Sequence[socket.socket], front_pid: int, host_names: HostNames
) -> None:
    history = History()
    http = HttpServer(Pages(front, history, front_pid).answer, host_names.allows)
    for listener in listeners:
        await http.start(listener)
    while True:
        with contextlib.suppress(TimeoutError):
            history.add(await front.status())
        await asyncio.sleep(_SAMPLE_S)


if __name__ == "__main__":
    main()
