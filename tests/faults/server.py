"""A server that is there to be hurt: its processes can be killed and started again at the same addresses."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil
from tests.servers import endpoints_of, free_port, is_running, wait_until, workers_of

import bngrad

WORKERS = 2
TRANSFER_TIMEOUT_S = 3
OPTIONS = (
    *("--workers", str(WORKERS)),
    *("--arena-bytes", str(2**28)),
    *("--shared-bytes", str(2**30)),
    *("--transfer-timeout", str(TRANSFER_TIMEOUT_S)),
)
_MARK = "BNGRAD_TEST_SERVICE"
_OWN_SHARED_MEMORY = 'mount -t tmpfs -o size="$0" bngrad-test /dev/shm && exec "$@"'


class RestartableServer:
    """Runs ``bngrad serve`` on a TCP port and a Unix socket for the length of a ``with`` block.

    Attributes:
        target: Its TCP address, the same after every start.
        unix_target: Its Unix socket, alike.
        process: The front process that was started last.
    """

    process: subprocess.Popen[str]
    drain_timeout_s = 30.0

    def __init__(
        self,
        *,
        options: tuple[str, ...] = OPTIONS,
        environment: Mapping[str, str] | None = None,
        shm: str | None = None,
    ) -> None:
        """Nothing runs before the block begins.

        Args:
            options: Of ``bngrad serve``.
            environment: Variables for its processes, beside those of this one.
            shm: If given, the processes see a /dev/shm of their own, of this size: "64k", for example.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="bngrad-faults-"))
        self._log = self._directory / "log"
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        self._environment = {**os.environ, **(environment or {}), **dict([self._mark.split("=")])}
        self.target = f"127.0.0.1:{free_port()}"
        self.unix_target = f"unix:{self._directory}/bngrad.sock"
        listen = ("--listen", self.target, "--listen", self.unix_target)
        self._command = [sys.executable, "-m", "bngrad_cli", "serve", "--device", "cpu", *listen, *options]
        self._command += ["--drain-timeout", str(self.drain_timeout_s)]
        self._has_own_shm = shm is not None
        if shm is not None:
            unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
            self._command = [*unshare, "sh", "-c", _OWN_SHARED_MEMORY, shm, *self._command]

    def __enter__(self) -> RestartableServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self._kill()
            if kind is not None:
                print(self.log()[-20_000:])
            shutil.rmtree(self._directory)

    def start(self) -> None:
        """Starts the server, and returns once it is ready."""
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert re.search(r" ready on ", line), f"the server did not start: {line}{self.log()}"
        self.process.stdout.close()

    def restart(self) -> None:
        """Starts it again, whatever is left of it."""
        self._kill()
        self.start()

    def log(self) -> str:
        """What its processes have written to stderr."""
        return self._log.read_text()

    def tracebacks(self, start: int) -> list[str]:
        """What the log, from a position on, has of exceptions; those that it should have are none.

        These are grpcio's complaints about headers of others, and that the system has no more descriptors.
        """
        records = re.split("\n(?=[^\n]*\nTraceback)", "\n" + self.log()[start:])[1:]
        return [record for record in records if not re.search("Invalid encoding on b|Too many open files", record)]

    def workers(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in workers_of(self.process.pid)]

    def pids(self) -> list[int]:
        """Every process of this service that runs, whether its front process does or not."""
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def addresses(self) -> dict[str, str]:
        """Every address that takes calls, by a name for it; those on this host as this process can reach them."""
        endpoints = endpoints_of(self.target)
        addresses = {
            "grpcio TCP": self.target,
            "grpcio Unix": self.unix_target,
            "TCP": f"127.0.0.1:{endpoints.stream_port}",
        }
        if endpoints.local_directory:
            addresses["Unix"] = f"unix:/proc/{self.process.pid}/root{endpoints.local_directory}/calls"
            addresses["regions"] = f"unix:/proc/{self.process.pid}/root{endpoints.local_directory}/regions"
        return addresses

    def files(self) -> list[Path]:
        """What it has made in the file system for its clients."""
        directory = endpoints_of(self.target).local_directory
        return [self._directory / "bngrad.sock", *([Path(directory)] if directory else [])]

    def inside(self) -> list[str]:
        """What a command is to begin with that shall see what the server sees of the file system."""
        if not self._has_own_shm:
            return []
        command = ["nsenter", "--target", str(self.process.pid), "--mount", f"--wd={Path.cwd()}"]
        return command if os.getuid() == 0 else [*command, "--user", "--preserve-credentials"]

    def wait_until_whole(self) -> None:
        """Returns once every worker is there and ready."""
        with bngrad.Client(self.target) as client:
            wait_until(lambda: all(device.state == "ready" for device in client.server_info().devices))
        wait_until(lambda: len(self.workers()) == WORKERS)

    def _kill(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return self._mark in Path(f"/proc/{process.pid}/environ").read_text().split("\0") and is_running(
                process.pid
            )
        except (OSError, psutil.Error):
            return False
