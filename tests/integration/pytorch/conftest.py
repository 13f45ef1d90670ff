"""A client of the shared server, and one thread for PyTorch, whose idle threads would take cores from that server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import bngrad
from bngrad_cli.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def client(server: EmbeddedServer) -> Iterator[bngrad.Client]:
    with bngrad.Client(server.target) as client:
        yield client


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
