"""A client of a real server, to compare with what other libraries compute in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import bngrad
from bngrad_cli.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def client() -> Iterator[bngrad.Client]:
    with EmbeddedServer() as server, bngrad.Client(server.target) as client:
        yield client
