"""Where the backward passes of layers are computed, found by measuring both places in the first steps."""

from __future__ import annotations

import statistics
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Gradients = TypeVar("Gradients")

_WARM_UPS = 1
_USES = 4
"""How often a layer is measured in each place; the first time, which opens connections, does not count."""
_WORTHWHILE = 0.9
"""What part of PyTorch's time the client may take: a layer that it computes runs Python that is not measured."""


class Placements:
    """The placements of a model's layers; those that are fixed by the same step are printed in one table."""

    def __init__(self) -> None:
        self._all: list[Placement] = []
        self._unprinted: list[Placement] = []

    def add(self, name: str) -> Placement:
        """Returns the placement of another layer."""
        self._all.append(Placement(name, self))
        return self._all[-1]

    def report(self, fixed: Placement) -> None:
        """Prints a table to stderr, of what was fixed since the last one, unless other layers are about to be fixed."""
        self._unprinted.append(fixed)
        if any(each.is_due for each in self._all):
            return
        lines = ["bngrad: medians of the backward passes of batch normalisations, in milliseconds"]
        lines += [each.line() for each in self._all if each in self._unprinted]
        self._unprinted.clear()
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
        self._was_cold = False  # before the client's first measured time
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()  # uses whose backward pass is still to come

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the uses, which belong to graphs of this process that no copy of the layer has."""
        return {name: value for name, value in vars(self).items() if name != "_begun"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _begun=weakref.WeakSet())

    @property
    def is_left_to_pytorch(self) -> bool:
        """Whether the next use may be PyTorch's own: it is faster, and no backward pass of ours is still to come.

        For such a one a checkpoint would repeat the forward pass, and must save the same tensors again.
        """
        return self.by_client is False and not self._begun

    @property
    def is_due(self) -> bool:
        """Whether the next backward pass fixes it. A layer that is used no longer may stay before that for good."""
        return self.by_client is None and sum(map(len, self._seconds.values())) == 2 * (_WARM_UPS + _USES) - 1

    def next_by_client(self) -> bool:
        """Returns whether the client computes the next backward pass."""
        if self.by_client is not None:
            return self.by_client
        uses = sum(map(len, self._seconds.values()))
        return uses % 4 in (0, 3)  # so that uses of two sizes, by turns, are measured in both places

    def begin(self, use: Any) -> None:
        """Expects the backward pass of a use, given by its context of autograd."""
        self._begun.add(use)

    def compute(
        self,
        use: Any,
        by_client: Callable[[], Gradients],
        by_pytorch: Callable[[], Gradients],
        is_server_cold: Callable[[], bool],
    ) -> Gradients:
        """Computes a use's gradients in the place whose turn it is, and measures it as long as none is chosen."""
        is_by_client = self.next_by_client()
        start = time.perf_counter()
        found = by_client() if is_by_client else by_pytorch()
        if self.by_client is None:
            self._seconds[is_by_client].append(time.perf_counter() - start)
            if is_by_client and len(self._seconds[True]) == _WARM_UPS:
                self._was_cold = is_server_cold()
            self._decide()
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # else there may be another backward pass
            self._begun.discard(use)
        return found

    def line(self) -> str:
        """Returns the layer's line of the table."""
        local, client = (1e3 * self._median(by_client) for by_client in (False, True))
        return f"  {self._name}: PyTorch {local:.2f}, client {client:.2f}: {'client' if self.by_client else 'PyTorch'}"

    def _decide(self) -> None:
        if min(map(len, self._seconds.values())) < _WARM_UPS + _USES:
            return
        is_faster = self._median(True) < _WORTHWHILE * self._median(False)
        if is_faster or not self._was_cold:
            self.by_client = is_faster
            self._placements.report(self)
        else:  # it will be faster, so all is measured again
            self._seconds = {False: [], True: []}

    def _median(self, by_client: bool) -> float:
        return statistics.median(self._seconds[by_client][_WARM_UPS:])
