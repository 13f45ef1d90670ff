"""The threads that compute kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest
from tests.kernels.cpu import fixed_bits

from bngrad_kernels import backends
from bngrad_kernels.cpu import backend, threads


class Arriving(threads.PythonThreads):
    """Threads that join their team some seconds late, or never."""

    def __init__(self, delays_s: Sequence[float]) -> None:
        super().__init__()
        self._delays_s = delays_s

    def join(self, kernel: int, call: int, number: int, count: int) -> None:
        if (delay_s := self._delays_s[number]) < math.inf:
            time.sleep(delay_s)
            super().join(kernel, call, number, count)


def test_without_openmp_the_threads_of_python_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "team", threads.PythonThreads)
    assert_bits(threads=3)


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_any_number_of_threads_computes_the_same_bits(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "ALONE_BELOW_NBYTES", 0)
    assert_bits(count)


@pytest.mark.parametrize(
    "delays_s",
    [(0, 0.001, 0.003), (0.002, 0, 0.001), (0, math.inf, math.inf), (math.inf, 0.001, 0)],
    ids=["others late", "first late", "others never", "first never"],
)
def test_threads_that_come_late_or_never_keep_no_other_waiting(
    delays_s: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "ALONE_BELOW_NBYTES", 0)
    monkeypatch.setattr(backend, "team", lambda: Arriving(delays_s))
    assert_bits(len(delays_s))


def assert_bits(threads: int) -> None:
    computing, expected = backends.create("cpu", threads=threads), fixed_bits.expected()
    for number in range(100):
        assert fixed_bits.digest(number, computing) == expected[number]
