"""A client of a real server, to compare with what other libraries compute in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import bngrad
from bngrad_cli.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def target() -> Iterator[str]:
    with EmbeddedServer() as server:
        yield server.target


@pytest.fixture(scope="session")
def client(target: str) -> Iterator[bngrad.Client]:
    with bngrad.Client(target) as client:
        yield client


class CountedClient(bngrad.Client):
    """A client that knows how many elements each of its calls had.

    Attributes:
        sizes: One for each call.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.sizes: list[int] = []

    def fused_batch_norm_grad_v3(self, y_backprop: Any, *others: Any, **named: Any) -> Any:
        self.sizes.append(np.size(y_backprop))
        return super().fused_batch_norm_grad_v3(y_backprop, *others, **named)

    def fused_batch_norm_grad_grad(self, grad_x_backprop: Any, *others: Any, **named: Any) -> Any:
        self.sizes.append(np.size(grad_x_backprop))
        return super().fused_batch_norm_grad_grad(grad_x_backprop, *others, **named)


@pytest.fixture
def counted(target: str) -> Iterator[CountedClient]:
    with CountedClient(target) as client:
        yield client
