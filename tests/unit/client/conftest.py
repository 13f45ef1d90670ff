"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.client.calls import ClientClass
from tests.unit.client.endpoints import Server, server

import bngrad
import bngrad.aio


@pytest.fixture(params=[bngrad.Client, bngrad.aio.Client], ids=["blocking", "asynchronous"])
def client_class(request: pytest.FixtureRequest) -> ClientClass:
    chosen: ClientClass = request.param
    return chosen


@pytest.fixture
def served() -> Iterator[Server]:
    with server() as made:
        yield made
