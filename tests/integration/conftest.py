"""Real servers in processes of their own, and clients over real sockets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bngrad
from bngrad_server.embedded import EmbeddedServer

WORKER_RESTART_TIMEOUT_S = 60.0


@pytest.fixture(scope="session")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("socket") / "bngrad.sock"


@pytest.fixture(scope="session")
def server(socket_path: Path) -> Iterator[EmbeddedServer]:
    """One server for all tests that leave it as it was, on TCP and on a Unix socket."""
    with EmbeddedServer(options=("--listen", f"unix:{socket_path}")) as server:
        yield server


@pytest.fixture(scope="session", params=["tcp", "unix"])
def target(request: pytest.FixtureRequest, server: EmbeddedServer, socket_path: Path) -> str:
    return server.target if request.param == "tcp" else f"unix:{socket_path}"


@pytest.fixture(scope="session")
def client(target: str) -> Iterator[bngrad.Client]:
    with bngrad.Client(target) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server that the test may hurt."""
    with EmbeddedServer() as server:
        yield server


def worker_pid(server: EmbeddedServer) -> int:
    """The process id of a server's only worker."""
    threads = Path(f"/proc/{server.process.pid}/task").iterdir()
    (pid,) = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return pid


def wait_until(condition: Callable[[], bool], timeout_s: float = WORKER_RESTART_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
