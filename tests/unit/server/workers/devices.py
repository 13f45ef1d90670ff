"""A device that computes nothing, for the tests of the memory that workers have it prepare."""

from __future__ import annotations

from collections.abc import Sequence

from bngrad_kernels.backend import Backend
from bngrad_kernels.problem import AnyProblem, Array


class Device(Backend):
    """Records the sizes of the memory that is page-locked."""

    description = "notes"
    memory_nbytes = 1 << 30
    used_nbytes = 0

    def __init__(self) -> None:
        self.locked: list[int] = []

    def warm_up(self) -> None:
        pass

    def self_test(self, *, is_long: bool = False) -> int:
        return 0

    def register(self, memory: Array) -> None:
        self.locked.append(memory.nbytes)

    def unregister(self, memory: Array) -> None:
        self.locked.remove(memory.nbytes)

    def run(self, problems: Sequence[AnyProblem]) -> None:
        raise AssertionError("nothing is computed")
