"""The front process's side: keeps the HTTP process running, and tells it how the server is."""

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

logger = logging.getLogger(__name__)

_BACKLOG = 128
_EXIT_TIMEOUT_S = 5.0
_RESTART_DELAY_S = 1.0


class MonitorSupervisor:
    """The HTTP process and the thread that keeps it.

    Attributes:
        address: Where it listens: host and port.
    """

    def __init__(self, address: str, status: Callable[[], dict[str, Any]]) -> None:
        """Listens, and answers from `start` on.

        Args:
            address: ``HOST:PORT``; port 0 takes a free one.
            status: Tells, from any thread, how the server is.

        Raises:
            OSError: The address is taken or not ours.
        """
        host, _, port = address.rpartition(":")
        bare_host = host.strip("[]")
        family = socket.getaddrinfo(bare_host, int(port), type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((bare_host, int(port)), family=family, backlog=_BACKLOG)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._status = status
        self._closing = threading.Event()
        self._mutex = threading.Lock()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        """Answers from now on."""
        self._thread.start()

    def close(self) -> None:
        """Ends the process."""
        self._closing.set()
        with self._mutex, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._keep_one()
            except Exception:
                logger.exception("the HTTP port is not served for a moment")
            self._closing.wait(_RESTART_DELAY_S)

    def _keep_one(self) -> None:
        """Serves one process until it ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = self._start_process(theirs)
            with self._mutex:
                self._socket = ours
            try:
                while not self._closing.is_set() and ours.recv(1):
                    ours.send(json.dumps(self._status()).encode())
            finally:
                with self._mutex:
                    self._socket = None
                ours.close()  # which is its signal to end
                _end(process)
        if not self._closing.is_set():
            logger.error("the HTTP process ended with exit code %d and is started again", process.returncode)

    def _start_process(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fds = (theirs.fileno(), self._listener.fileno())
        return subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "bngrad_server.monitor", *map(str, fds), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=fds,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
