"""Problems that are computed again and again at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
from tests.kernels.cpu import fixed_bits

from bngrad_kernels.cpu import backend, records
from bngrad_kernels.cpu.backend import CpuBackend
from bngrad_kernels.problem import AnyProblem

PROBLEMS = range(100)


Bind: TypeAlias = Callable[[CpuBackend, AnyProblem], Callable[[], None]]


class Bound:
    """Computes each problem three times, without its outputs of the time before."""

    def __init__(self, bind: Bind) -> None:
        self._backend = CpuBackend(threads=3)
        self._bind = bind

    def run(self, problems: Sequence[AnyProblem]) -> None:
        for problem in problems:
            run = self._bind(self._backend, problem)
            for _ in range(3):
                for name in (*problem.large_outputs, *problem.small_outputs):
                    getattr(problem, name).fill(0)
                run()


def bind_at(made: CpuBackend, problem: AnyProblem) -> Callable[[], None]:
    """By the addresses of a problem of the first order, all of whose channels are computed."""
    if problem.spec.order == 2 or problem.channels is not None or not problem.spec.channels:
        return lambda: made.run([problem])
    arrays = (getattr(problem, name) for name in records.FIRST_ORDER)
    addresses = [0 if array is None else array.ctypes.data for array in arrays]
    run = made.bound_at(problem.spec)
    return lambda: run(*addresses)


@pytest.mark.parametrize("alone_below_nbytes", [0, 2**16], ids=["divided", "mixed"])
@pytest.mark.parametrize(
    "bind", [CpuBackend.bound, CpuBackend.bound_to_team, bind_at], ids=["one thread", "team", "addresses"]
)
def test_every_run_has_the_same_bits(bind: Bind, alone_below_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "ALONE_BELOW_NBYTES", alone_below_nbytes)
    bound: Any = Bound(bind)
    assert fixed_bits.digests(PROBLEMS, bound) == fixed_bits.expected()[: len(PROBLEMS)]
