"""Helpers for tests that run servers and clients as processes."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import grpc
import psutil
import pytest

from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc

DEVICE = os.environ.get("BNGRAD_TEST_DEVICE", "cpu")
"""The device of the shared server; `make gpu-test` sets a GPU."""
TIMEOUT_S = 60.0
SMALL_ARENA = () if DEVICE == "cpu" else ("--arena-bytes", "1GiB")
"""Limits the arena with a GPU, whose worker page-locks it at the start."""
PATIENT_SUPERVISOR = ("--worker-timeout", "60", *SMALL_ARENA)
"""Options for tests that stop workers: the supervisor must not replace them meanwhile."""
ONE_WORKER = ("--workers", "1", "--front-bytes", "0", *PATIENT_SUPERVISOR)
"""Options for tests that stop or watch the only worker, which computes all requests."""
BNGRAD = (sys.executable, "-m", "bngrad_cli")
"""The command line."""
Transport = Literal["auto", "unary", "stream", "shared"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


def free_port(*hosts: str) -> int:
    """Returns a TCP port that stays free while a server restarts on it, on these addresses or 127.0.0.1.

    It is below the system's ephemeral ports, and in a range that no other process of the same test run uses.
    """
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = above - 1 - number - count * secrets.randbelow(10_000 // count)
        with ExitStack() as stack, suppress(OSError):
            for host in hosts or ("127.0.0.1",):
                stack.enter_context(socket.create_server((host, port)))
            return port


def hold_new_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the path of a file: while it exists, workers of servers started from now on wait before they begin."""
    gate = folder / "gate"
    waits = f"while os.path.exists({str(gate)!r}):\n        time.sleep(0.01)"
    code = f"import os, sys, time\nif 'bngrad_server.workers.main' in sys.orig_argv:\n    {waits}\n"
    run_at_start(code, folder, monkeypatch)
    return gate


def run_at_start(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every Python process that the test starts from now on run this code first."""
    with (folder / "sitecustomize.py").open("a") as file:
        file.write(code)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@contextmanager
def starting_server(address: str, gate: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server whose worker does not begin while the gate exists, see `hold_new_workers`."""
    gate.touch()
    command = [*BNGRAD, "serve", *ONE_WORKER, "--listen", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: bool(workers_of(process.pid)))
        yield process
    finally:
        process.terminate()
        process.communicate()
        gate.unlink(missing_ok=True)  # a held worker has not yet asked to be killed with its server


def workers_of(front: int) -> list[psutil.Process]:
    return children_of(front, "bngrad_server.workers.main")


def children_of(front: int, module: str) -> list[psutil.Process]:
    """Returns the running children of a front process that run this module."""
    return [child for child in psutil.Process(front).children() if is_running(child.pid) and _runs(child, module)]


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def worker_pids(server: EmbeddedServer) -> list[int]:
    return [worker.pid for worker in workers_of(server.process.pid)]


def worker_pid(server: EmbeddedServer) -> int:
    """Returns the process id of a server's only worker."""
    (pid,) = worker_pids(server)
    return pid


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S, poll_s: float = 0.01) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(poll_s)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ports_of(front: int) -> set[int]:
    """Returns the TCP ports on which a front process listens."""
    connections = psutil.Process(front).net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def endpoints_of(target: str, token: str = "") -> pb.Endpoints:
    """Asks a server for its other addresses."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(target) as channel:
        stub = pb_grpc.BatchNormGradServiceStub(channel)
        return stub.ServerInfo(pb.ServerInfoRequest(), metadata=metadata).endpoints


def targets_of(target: str) -> dict[str, str]:
    """Returns every address for calls: the port, and the socket for shared memory."""
    return {"tcp": target, "local": f"unix:{endpoints_of(target).local_directory}/calls"}


def run_bngrad(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(environment or {})}
    return subprocess.run([*BNGRAD, *arguments], env=environment, capture_output=True, text=True)


@contextmanager
def interruptible(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a command that SIGINT interrupts, with its output piped as text; killed when the block ends.

    Where the tests run in the background of a script, SIGINT is ignored, and child processes inherit that; Python then
    installs no handler for Ctrl-C.
    """
    command = ["env", "--default-signal=INT", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs Python code that prints "ready" once it is where the test wants it; see `interruptible`."""
    with interruptible([sys.executable, "-c", code, *map(str, arguments)]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def regions_of(pid: int) -> int:
    """Counts a process's descriptors and mappings of memory shared with clients."""
    mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("bngrad-region" in each for each in [*descriptors_of(pid).values(), *mappings])


def descriptors_of(pid: int) -> dict[Path, str]:
    """Returns the open descriptors of a process and their targets."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[path] = str(path.readlink())
    return found
