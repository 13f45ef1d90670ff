"""Keeps the HTTP process running, and sends it the server's status; runs in the front process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from bngrad_kernels.child import module_command
from bngrad_server.runtime.listening import tcp_listeners
from bngrad_server.runtime.processes import end_process
from bngrad_wire.addresses import format_host_port, host_and_port

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 5.0
_RESTART_DELAY_S = 1.0


class MonitorSupervisor:
    """Supervises the HTTP process in a thread.

    Attributes:
        address: Where the process listens: host and port.
    """

    def __init__(self, address: str, names: str, status: Callable[[], dict[str, Any]]) -> None:
        """Listens on ``HOST:PORT``, where port 0 takes a free one; calls ``status`` in its own thread.

        Args:
            address: Where to listen.
            names: Further names by which it may be asked, with commas between them.
            status: Returns what the pages show.

        Raises:
            ListenError: The address is in use or not of this host.
        """
        place = host_and_port(address)
        assert place is not None
        self._listeners = tcp_listeners(*place)
        self.address = format_host_port(place[0], self._listeners[0].getsockname()[1])
        self._names = f"{place[0]},{names}"
        self._status = status
        self._closing = threading.Event()
        self._mutex = threading.Lock()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        """Starts the process."""
        self._thread.start()

    def close(self) -> None:
        """Ends the process."""
        self._closing.set()
        with self._mutex, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()
        for listener in self._listeners:
            listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._run_process()
            except Exception:
                logger.exception("the HTTP process failed and is started again")
            self._closing.wait(_RESTART_DELAY_S)

    def _run_process(self) -> None:
        """Starts a process, and sends it the status until it ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = self._start_process(theirs)
            with self._mutex:
                self._socket = ours
            try:
                while not self._closing.is_set() and ours.recv(1):
                    # Escaped, a client's words in failures could be larger than a packet may be.
                    ours.send(json.dumps(self._status(), ensure_ascii=False).encode(errors="surrogatepass"))
            finally:
                with self._mutex:
                    self._socket = None
                ours.close()  # makes the process end at its next sample
                if self._closing.is_set():
                    process.kill()
                code = end_process(process, _EXIT_TIMEOUT_S)
        if not self._closing.is_set():
            logger.error("the HTTP process ended with exit code %d and is started again", code)

    def _start_process(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fd, *listener_fds = fds = [each.fileno() for each in (theirs, *self._listeners)]
        return subprocess.Popen(  # noqa: S603 - our own module
            module_command("bngrad_server.monitor", fd, os.getpid(), self._names, *listener_fds),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=fds,
        )
