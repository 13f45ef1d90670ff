"""Other libraries that compute the gradients of fused batch norm: rivals of the benchmarks, oracles of the tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, TypeAlias

from bngrad_kernels.problem import Array, Problem

PEERS = {
    "tensorflow": "benchmarks.peers.tensorflow",
    "pytorch": "benchmarks.peers.pytorch",
    "onednn": "benchmarks.peers.onednn.primitive",
    "onednn-graph": "benchmarks.peers.onednn.graph",
}


class UnsupportedError(Exception):
    """A peer does not compute this problem."""


class Kernel(Protocol):
    """A peer's computation of one problem, with all one-time work done."""

    def run(self) -> None:
        """Computes the gradients, into the problem's own outputs where the peer takes preallocated ones."""

    def gradients(self) -> tuple[Array, Array, Array]:
        """x_backprop, scale_backprop and offset_backprop of the last run, in the problem's layout and dtypes."""


Prepare: TypeAlias = Callable[[Problem], Kernel]
"""Makes a problem ready for a peer. Raises `UnsupportedError`."""


def load(name: str) -> Prepare:
    """Imports a peer, which may take seconds. Raises ImportError or OSError where it is not installed."""
    prepare: Prepare = importlib.import_module(PEERS[name]).prepare
    return prepare


def version(name: str) -> str:
    text: str = importlib.import_module(PEERS[name]).version()
    return text
