"""The threads that compute kernels."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tests.kernels.cpu import fixed_bits

from bngrad_kernels import backends
from bngrad_kernels.cpu import backend, threads

PROBLEMS = range(100)
NEVER = math.inf


class Arriving(threads.PythonThreads):
    """Threads that join their team some seconds late, or never."""

    def __init__(self, delays_s: Sequence[float]) -> None:
        super().__init__()
        self._delays_s = delays_s

    def join(self, kernel: int, call: int, number: int) -> None:
        if (delay_s := self._delays_s[number]) < NEVER:
            time.sleep(delay_s)
            super().join(kernel, call, number)


def test_without_openmp_the_threads_of_python_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "team", threads.PythonThreads)
    assert_bits(3)


@pytest.mark.parametrize("team", [threads.PythonThreads, threads.threads])
def test_without_more_threads_one_computes_the_same_bits(team: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GNU OpenMP itself would end the process."""

    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(backend, "team", team)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert_bits(3)


@pytest.mark.parametrize("count", [2, 3, 8, 100])
def test_any_number_of_threads_computes_the_same_bits(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "ALONE_BELOW_NBYTES", 0)
    assert_bits(count)


@pytest.mark.parametrize(
    "delays_s",
    [(0, 0.001, 0.003), (0.002, 0, 0.001), (0, NEVER, NEVER), (NEVER, 0.001, 0)],
    ids=["others late", "first late", "others never", "first never"],
)
@pytest.mark.parametrize("alone_below_nbytes", [0, 2**16], ids=["divided", "mixed"])
def test_threads_that_come_late_or_never_keep_no_other_waiting(
    alone_below_nbytes: int, delays_s: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "ALONE_BELOW_NBYTES", alone_below_nbytes)
    monkeypatch.setattr(backend, "team", lambda: Arriving(delays_s))
    assert_bits(len(delays_s))


def assert_bits(count: int) -> None:
    """Computes problems with this many threads, alone and in a batch."""
    computing, expected = backends.create("cpu", threads=count), fixed_bits.expected()[: len(PROBLEMS)]
    assert [fixed_bits.digest(number, computing) for number in PROBLEMS] == expected
    assert fixed_bits.digests(PROBLEMS, computing) == expected
