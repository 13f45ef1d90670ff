"""A server whose processes can be killed, and restarted on the same addresses."""

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
from contextlib import suppress
from pathlib import Path
from random import Random
from types import TracebackType

import psutil
from tests.servers import endpoints_of, free_port, is_running, run_bngrad, wait_until, workers_of

import bngrad
from bngrad_kernels.cpu.machine_code.kernels import host
from bngrad_kernels.cpu.machine_code.warm import missing
from bngrad_wire.token_format import new_token

WORKERS = 2
TRANSFER_TIMEOUT_S = 3
OPTIONS = (
    *("--workers", str(WORKERS)),
    *("--arena-bytes", str(2**28)),
    *("--shared-bytes", str(2**31)),  # half is for one client: all that show the token of the load are one
    *("--transfer-timeout", str(TRANSFER_TIMEOUT_S)),
)
_MARK = "BNGRAD_TEST_SERVICE"
_OWN_SHARED_MEMORY = 'mount -t tmpfs -o size="$0" bngrad-test /dev/shm && exec "$@"'


class RestartableServer:
    """Runs ``bngrad serve`` on a TCP port and a Unix socket, the same after every start, during a ``with`` block."""

    process: subprocess.Popen[str]
    drain_timeout_s = 30.0
    token = ""
    """What the load shows; empty if the server asks for none."""
    attackers_token = ""
    http = ""

    def __init__(
        self,
        *,
        options: tuple[str, ...] = OPTIONS,
        environment: Mapping[str, str] | None = None,
        shm: str | None = None,
        is_attacked: bool = False,
    ) -> None:
        """Nothing runs before the block begins.

        Args:
            options: Of ``bngrad serve``.
            environment: Further variables.
            shm: The size of a private /dev/shm, such as "64k".
            is_attacked: Whether it asks for tokens and serves all that attacks are for.
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
        if is_attacked:
            self.http = f"127.0.0.1:{free_port()}"
            self._command += ["--insecure", "--token-file", str(self._write_tokens())]
            self._command += ["--http", self.http]
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
        """Starts the server, and returns once it is ready.

        Its kernels are compiled before: beside other tests, a compiler of the lowest priority would take minutes.
        """
        if missing(host()):
            warmed = run_bngrad("warm")
            assert warmed.returncode == 0, warmed.stdout + warmed.stderr
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert re.search(r" ready on ", line), f"the server did not start: {line}{self.log()}"
        self.process.stdout.close()

    def restart(self) -> None:
        """Kills what is left of it, and starts it again."""
        self._kill()
        self.start()

    def log(self) -> str:
        return self._log.read_text()

    def tracebacks(self, start: int) -> list[str]:
        """Returns the tracebacks in the log from a position on, except for those of exhausted file descriptors."""
        records = re.split("\n(?=[^\n]*\nTraceback)", "\n" + self.log()[start:])[1:]
        return [record for record in records if "Too many open files" not in record]

    def workers(self) -> list[int]:
        return [worker.pid for worker in workers_of(self.process.pid)]

    def kill_a_worker(self, rng: Random) -> None:
        """Kills a worker, as soon as there is one: another fault may be killing them all."""
        wait_until(lambda: self._killed_one_of(self.workers(), rng))

    @staticmethod
    def _killed_one_of(workers: list[int], rng: Random) -> bool:
        for pid in rng.sample(workers, len(workers)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def pids(self) -> list[int]:
        """Returns the process ids of all its running processes, also without the front process."""
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def addresses(self) -> dict[str, str]:
        """Returns every address by name; local sockets by a path that this process can reach."""
        endpoints = endpoints_of(self.target, self.token)
        addresses = {"TCP": self.target, "Unix": self.unix_target}
        if endpoints.local_directory:
            addresses["local"] = f"unix:/proc/{self.process.pid}/root{endpoints.local_directory}/calls"
            addresses["regions"] = f"unix:/proc/{self.process.pid}/root{endpoints.local_directory}/regions"
        return addresses

    def files(self) -> list[Path]:
        """Returns the files that it has made for its clients."""
        directory = endpoints_of(self.target, self.token).local_directory
        return [self._directory / "bngrad.sock", *([Path(directory)] if directory else [])]

    def inside(self) -> list[str]:
        """Returns the prefix of a command that runs in the server's mount namespace."""
        if not self._has_own_shm:
            return []
        command = ["nsenter", "--target", str(self.process.pid), "--mount", f"--wd={Path.cwd()}"]
        return command if os.getuid() == 0 else [*command, "--user", "--preserve-credentials"]

    def client(self) -> bngrad.Client:
        return bngrad.Client(self.target, token=self.token or None, insecure=True)

    def wait_until_whole(self) -> None:
        with self.client() as client:
            wait_until(lambda: all(device.state == "ready" for device in client.server_info().devices))
        wait_until(lambda: len(self.workers()) == WORKERS)

    def _write_tokens(self) -> Path:
        self.token, own = new_token("load")
        self.attackers_token, attackers = new_token("attacker")
        path = self._directory / "tokens"
        path.touch(0o600)
        path.write_text(f"{own}\n{attackers}\n")
        return path

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
