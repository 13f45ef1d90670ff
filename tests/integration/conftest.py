"""Real servers in processes of their own, and clients over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import bngrad
from bngrad_server.embedded import EmbeddedServer

TIMEOUT_S = 60.0


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


def worker_pids(server: EmbeddedServer) -> list[int]:
    """The process ids of a server's running workers."""
    children = psutil.Process(server.process.pid).children()
    return [child.pid for child in children if is_running(child.pid)]


def worker_pid(server: EmbeddedServer) -> int:
    """The process id of a server's only worker."""
    (pid,) = worker_pids(server)
    return pid


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S, poll_s: float = 0.01) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(poll_s)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
