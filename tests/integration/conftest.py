"""Fixtures: real servers, and clients over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import DEVICE, ONE_WORKER, PATIENT_SUPERVISOR, TRANSPORTS, Transport, free_port

import bngrad
from bngrad_cli.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("socket") / "bngrad.sock"


@pytest.fixture(scope="session")
def server(socket_path: Path) -> Iterator[EmbeddedServer]:
    """A server on TCP and on a Unix socket, shared by all tests that leave it unchanged."""
    with EmbeddedServer(device=DEVICE, options=("--listen", f"unix:{socket_path}", *PATIENT_SUPERVISOR)) as server:
        yield server


@pytest.fixture(scope="session", params=["tcp", "unix"])
def target(request: pytest.FixtureRequest, server: EmbeddedServer, socket_path: Path) -> str:
    return server.target if request.param == "tcp" else f"unix:{socket_path}"


@pytest.fixture(scope="session", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@pytest.fixture(scope="session")
def client(target: str, transport: Transport) -> Iterator[bngrad.Client]:
    """A client for each address and transport."""
    with bngrad.Client(target, transport=transport) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server with one worker, which the test may damage."""
    with EmbeddedServer(f"127.0.0.1:{free_port()}", device=DEVICE, options=ONE_WORKER) as server:
        yield server
