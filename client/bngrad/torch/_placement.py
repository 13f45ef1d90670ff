"""Where the backward passes of layers are computed, found by measuring both places in the first steps."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from torch import Tensor

_WARM_UPS = 1
_USES = 4
"""How often a layer is measured in each place; the first time, which opens connections, does not count."""


class Placements:
    """The placements of a model's layers, printed once all are fixed."""

    def __init__(self) -> None:
        self._all: list[Placement] = []

    def add(self, name: str) -> Placement:
        """Returns the placement of another layer."""
        self._all.append(Placement(name, self))
        return self._all[-1]

    def report(self) -> None:
        """Prints a table to stderr if all layers that are in use are fixed."""
        if any(each.by_client is None and each.is_in_use for each in self._all):
            return
        lines = ["bngrad: medians of the backward passes of batch normalisations, in milliseconds"]
        lines += [each.line() for each in self._all if each.by_client is not None]
        print("\n".join(lines), file=sys.stderr)


class Placement:
    """Where one layer's backward pass is computed.

    Attributes:
        by_client: Whether the client computes it, or PyTorch; None while both are measured.
    """

    def __init__(self, name: str, placements: Placements) -> None:
        self.by_client: bool | None = None
        self._name = name
        self._placements = placements
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    @property
    def is_in_use(self) -> bool:
        """Whether a backward pass has been measured."""
        return any(self._seconds.values())

    def next_by_client(self) -> bool:
        """Returns whether the client computes the backward pass of the next use."""
        if self.by_client is not None:
            return self.by_client
        return len(self._seconds[True]) <= len(self._seconds[False])

    def measure(self, y: Tensor, *, by_client: bool) -> None:
        """Measures the backward pass that makes the gradient of a layer's output."""
        node = y.grad_fn
        if self.by_client is not None or node is None:
            return
        starts: list[float] = []

        def start(_: Any) -> None:
            starts.append(time.perf_counter())

        def stop(*_: Any) -> None:
            if starts and self.by_client is None:
                self._seconds[by_client].append(time.perf_counter() - starts.pop())
                self._decide()

        node.register_prehook(start)
        node.register_hook(stop)

    def line(self) -> str:
        """Returns the layer's line of the table."""
        local, client = (1e3 * self._median(by_client) for by_client in (False, True))
        return f"  {self._name}: PyTorch {local:.2f}, client {client:.2f}: {'client' if self.by_client else 'PyTorch'}"

    def _decide(self) -> None:
        if min(map(len, self._seconds.values())) >= _WARM_UPS + _USES:
            self.by_client = self._median(True) < self._median(False)
            self._placements.report()

    def _median(self, by_client: bool) -> float:
        return statistics.median(self._seconds[by_client][_WARM_UPS:])
