"""Runs a server of the caller's own as a child process."""

from __future__ import annotations

import os
import subprocess
import tempfile
from typing import IO

from bngrad_kernels.child import module_command
from bngrad_server.runtime.processes import end_process
from bngrad_wire.addresses import ready_address

_STOP_TIMEOUT_S = 30.0


class ServerStartError(Exception):
    """The server ended before it was ready; the message holds its stderr."""


class EmbeddedServer:
    """Runs ``bngrad serve`` during a ``with`` block, with the given options and no settings of the environment.

    The server stops when this process has gone, also if it was killed.

    Attributes:
        device: The device that it computes on.
        target: The first address on which the server listens, for clients.
        process: The server's front process.
    """

    target: str
    process: subprocess.Popen[str]

    def __init__(self, listen: str = "127.0.0.1:0", *, device: str = "cpu", options: tuple[str, ...] = ()) -> None:
        """Starts nothing before the block begins.

        Args:
            listen: ``HOST:PORT``, with port 0 for a free one, or ``unix:PATH``.
            device: The value of ``--device``.
            options: Further options of ``bngrad serve``.
        """
        self.device = device
        self._arguments = ["serve", "--listen", listen, "--device", device, *options]
        self._stderr: IO[bytes]

    def __enter__(self) -> EmbeddedServer:
        """Returns once the server is ready.

        Raises:
            ServerStartError: The server did not start.
        """
        self._stderr = tempfile.TemporaryFile()
        self.process = subprocess.Popen(  # noqa: S603 - our own module
            module_command("bngrad_cli.child", *self._arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("BNGRAD_")},
        )
        try:
            self.target = self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._stderr.close()

    def _wait_until_ready(self) -> str:
        """Returns the first address on which the server listens."""
        assert self.process.stdout is not None
        address = ready_address(self.process.stdout.readline())
        if address is None:
            self.stop()
            raise ServerStartError(f"the server did not start:\n{self.stderr()}")
        return address

    def stop(self) -> int:
        """Stops the server, kills it after a timeout, and returns its exit code."""
        self.process.terminate()
        code = end_process(self.process, _STOP_TIMEOUT_S)
        for file in (self.process.stdin, self.process.stdout):
            assert file is not None
            file.close()
        return code

    def stderr(self) -> str:
        """Returns what the server has written to stderr so far."""
        fd = self._stderr.fileno()
        # The server shares the file's position: seeking here would make it overwrite its own lines.
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
