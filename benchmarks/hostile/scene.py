"""The server under attack, the good clients at its doors, and the attackers, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import trustme
from benchmarks.hostile.victim import Victim
from benchmarks.ports import free_port
from benchmarks.warm_server import WarmServer

from bngrad_wire.token_format import new_token

MIB = 2**20
ARENA_BYTES = 256 * MIB
CLIENT_BYTES = 32 * MIB
MESSAGE_BYTES = 16 * MIB
CLIENT_REQUESTS = 16
_TENANTS = ("good", "attacker", "other")
BOUND_BYTES = ARENA_BYTES + 2 * len(_TENANTS) * CLIENT_BYTES
"""How far the server's memory may grow: the arena, and twice what its clients may have in it."""
_SAMPLE_S = 0.02
_QUIET_S = 0.5
_QUIET_PERCENT = 10.0
_QUIET_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Scene:
    """A server with tokens for several tenants.

    Attributes:
        server: The server.
        tokens: The tokens by tenant.
        ca: The authority of its certificate; empty without TLS.
        victim: A file with what attackers know, see `Victim.save`.
    """

    server: WarmServer
    tokens: dict[str, str]
    ca: str
    victim: Path

    def wait_until_quiet(self) -> None:
        """Waits until the server no longer works on what an attack has left, but not for ever."""
        front = psutil.Process(self.server.process.pid)
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        front.cpu_percent()
        while time.monotonic() < deadline:
            time.sleep(_QUIET_S)
            if front.cpu_percent() < _QUIET_PERCENT:
                break

    @contextlib.contextmanager
    def good_client(self, door: str) -> Iterator[GoodClient]:
        arguments = [door, self.server.target, self.tokens["good"], self.ca]
        command = [sys.executable, "-m", "benchmarks.hostile.good_client", *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield GoodClient(process)
            finally:
                process.kill()

    @contextlib.contextmanager
    def attack(self, name: str, doors: list[str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """Attacks during the block, which begins once the attack has; all doors of the attack, or these."""
        command = [sys.executable, "-m", "benchmarks.hostile", name, "--victim", str(self.victim)]
        command += ["--doors", *doors] if doors else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                yield process
            finally:
                process.kill()


class GoodClient:
    """The process of a good client, once it is ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        if self._line() != "ready\n":
            raise RuntimeError("a good client did not start")

    def begin(self, seconds: float) -> None:
        """Makes it call for this long."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def finish(self) -> dict[str, Any]:
        """Returns its latencies in seconds, and its errors."""
        measured: dict[str, Any] = json.loads(self._line())
        return measured

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class PeakMemory:
    """The most resident memory of a process, by a thread that samples it.

    Attributes:
        nbytes: The most since `reset`.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.nbytes = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self) -> int:
        """Begins anew with the memory of now, and returns that."""
        self.nbytes = self._process.memory_info().rss
        return self.nbytes

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                self.nbytes = max(self.nbytes, self._process.memory_info().rss)


@contextlib.contextmanager
def serving(*, tls: bool, is_limited: bool) -> Iterator[Scene]:
    """Runs a server, with TLS on TCP unless told otherwise, and with limits for each client if told so."""
    with tempfile.TemporaryDirectory(prefix="bngrad-hostile-") as name:
        directory = Path(name)
        lines, tokens = [], {}
        for tenant in _TENANTS:
            tokens[tenant], line = new_token(tenant)
            lines.append(line)
        (directory / "tokens").write_text("\n".join(lines) + "\n")
        (directory / "tokens").chmod(0o600)
        http = f"127.0.0.1:{free_port()}"
        options = [
            *("--listen", f"unix:{directory}/bngrad.sock", "--http", http),
            *("--token-file", str(directory / "tokens"), "--arena-bytes", str(ARENA_BYTES)),
            *("--shared-bytes", str(ARENA_BYTES), "--max-message-bytes", str(MESSAGE_BYTES)),
            *(() if tls else ("--insecure",)),
        ]
        if is_limited:
            options += ["--max-client-bytes", str(CLIENT_BYTES), "--max-client-requests", str(CLIENT_REQUESTS)]
        ca = ""
        if tls:
            ca, more = _certificate(directory)
            options += more
        with WarmServer(options=tuple(options)) as server:
            victim = Victim.discover(server.target, tokens["attacker"], ca or None, http)
            victim.save(directory / "victim.json")
            yield Scene(server, tokens, ca, directory / "victim.json")


def _certificate(directory: Path) -> tuple[str, list[str]]:
    authority = trustme.CA()
    own = authority.issue_cert("localhost", "127.0.0.1")
    ca, certificate, key = (directory / name for name in ("ca.pem", "server.pem", "server.key"))
    authority.cert_pem.write_to_path(ca)
    own.cert_chain_pems[0].write_to_path(certificate)
    own.private_key_pem.write_to_path(key)
    return str(ca), ["--tls-certificate", str(certificate), "--tls-key", str(key)]
