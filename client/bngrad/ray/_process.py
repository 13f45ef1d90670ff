"""A server as a child process that is started again when it dies."""

from __future__ import annotations

import logging
import math
import subprocess
import threading
import time
from collections.abc import Sequence

from bngrad_kernels.child import module_command
from bngrad_wire.addresses import ready_address

logger = logging.getLogger("bngrad")

_RESTART_DELAYS_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Before the next start, by how often in a row the server has ended before it was ready."""
_SILENT_S = 30.0
"""After this a server that is ready and answers nothing is killed; to start another one takes a few seconds."""
_STOP_TIMEOUT_S = 40.0
"""Longer than a server's own `--drain-timeout`, unless that is set."""


class ServerProcess:
    """Runs ``bngrad serve`` on a host of this node, and starts it again, at the same address if it is still free.

    It does so when the server has ended, and when it is frozen, as `heard` is told.

    The server's log goes to this process's stderr.
    """

    def __init__(self, host: str, options: Sequence[str]) -> None:
        """Starts the server without waiting until it is ready.

        Args:
            host: The address to listen on.
            options: Options of ``bngrad serve``.
        """
        self._host = host
        self._options = options
        self._target = ""
        self._mutex = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = False
        self._silent_since = math.inf
        self._stopping = threading.Event()
        self._ready_or_failed = threading.Event()
        # The system kills the server when the thread that has started it ends: this one lives as long as the actor.
        self._thread = threading.Thread(target=self._run, name="bngrad-server", daemon=True)
        self._thread.start()

    @property
    def target(self) -> str:
        """Where the server listens, also while it is being started again; empty before it has been ready once."""
        return self._target

    @property
    def pid(self) -> int:
        """The process id of the server's front process; of the last one while there is none."""
        return self._process.pid if self._process else 0

    def wait(self, timeout_s: float) -> None:
        """Waits until the server has been ready once.

        Raises:
            RuntimeError: It ended before it was ready, or is not ready in time.
        """
        self._ready_or_failed.wait(timeout_s)
        if self._target:
            return
        process = self._process
        code = process.poll() if process else None
        if code is None:
            raise RuntimeError(f"bngrad serve is not ready after {timeout_s:g} s")
        raise RuntimeError(f"bngrad serve ended with exit code {code}; Ray's log of this actor says why")

    def heard(self, *, has_answered: bool) -> None:
        """Records whether the server has answered a question; kills one that was ready and is silent for too long."""
        now = time.monotonic()
        with self._mutex:
            if has_answered or not self._is_ready or self._stopping.is_set():
                self._silent_since = math.inf
                return
            self._silent_since = min(self._silent_since, now)
            if now - self._silent_since > _SILENT_S and self._process is not None:
                logger.error("bngrad serve has answered nothing for %g s and is killed", _SILENT_S)
                self._process.kill()
                self._is_ready = False

    def stop(self) -> None:
        """Has the server finish its requests, and waits until it has ended."""
        self._stopping.set()
        with self._mutex:
            process = self._process
            if process:
                process.terminate()
        self._thread.join(_STOP_TIMEOUT_S)
        if process and self._thread.is_alive():
            process.kill()

    def _run(self) -> None:
        failures = 0
        while True:
            was_ready, code = self._serve()
            if self._stopping.is_set():
                return
            self._ready_or_failed.set()
            failures = 0 if was_ready else failures + 1
            logger.error("bngrad serve ended with exit code %d and is started again", code)
            if self._stopping.wait(_RESTART_DELAYS_S[min(failures, len(_RESTART_DELAYS_S) - 1)]):
                return
            if not was_ready and self._target:  # another process may have taken its port
                self._target = ""

    def _serve(self) -> tuple[bool, int]:
        """Runs a server to its end; returns whether it was ready, and its exit code."""
        listen = self._target or f"{self._host}:0"
        # As a child, it does not outlive an actor that is killed.
        command = module_command("bngrad_cli.child", "serve", "--listen", listen, *self._options)
        with self._mutex:
            if self._stopping.is_set():
                return False, 0
            process = subprocess.Popen(  # noqa: S603 - our own module
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._process = process
            self._silent_since = math.inf
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            address = ready_address(process.stdout.readline())
            if address is not None:
                self._target = address
                self._is_ready = True
                self._ready_or_failed.set()
            code = process.wait()
            self._is_ready = False
            return address is not None, code
