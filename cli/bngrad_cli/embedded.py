"""A server of one's own, as a separate process on this host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import IO

_STOP_TIMEOUT_S = 30.0


class ServerStartError(Exception):
    """The server ended before it was ready; the message holds what it wrote to stderr."""


class EmbeddedServer:
    """Runs ``bngrad serve`` for the length of a ``with`` block, with the options that it is given and no others.

    Attributes:
        target: The first address that it listens on, as clients take it.
        process: The server's front process.
    """

    target: str
    process: subprocess.Popen[str]

    def __init__(self, listen: str = "127.0.0.1:0", *, device: str = "cpu", options: tuple[str, ...] = ()) -> None:
        """Nothing runs before the block begins.

        Args:
            listen: ``HOST:PORT``, with port 0 for a free one, or ``unix:PATH``.
            device: As ``--device`` takes it.
            options: Further options of ``bngrad serve``.
        """
        self._arguments = ["serve", "--listen", listen, "--device", device, *options]
        self._stderr: IO[bytes]

    def __enter__(self) -> EmbeddedServer:
        """Returns once the server is ready.

        Raises:
            ServerStartError: It did not come up.
        """
        self._stderr = tempfile.TemporaryFile()
        self.process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "bngrad_cli", *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("BNGRAD_")},
        )
        assert self.process.stdout is not None
        ready = re.search(r" ready on ([^\s,]+?)[,:] ", self.process.stdout.readline())
        if ready is None:
            with self._stderr:
                self.stop()
                raise ServerStartError(f"the server did not start:\n{self.stderr()}")
        self.target = ready[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._stderr.close()

    def stop(self) -> int:
        """Ends the server, by force should it not end in time, and returns its exit code."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.returncode

    def stderr(self) -> str:
        """What the server has written to stderr so far."""
        fd = self._stderr.fileno()
        # To seek would have the server, which shares the position in the file, write over what is there.
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
