"""The threads that compute kernels."""

from __future__ import annotations

import pytest
from tests.kernels.cpu import fixed_bits

from bngrad_kernels import backends
from bngrad_kernels.cpu import backend, threads


def test_without_openmp_the_threads_of_python_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "team", threads.PythonThreads)
    without, expected = backends.create("cpu", threads=3), fixed_bits.expected()
    for number in range(100):
        assert fixed_bits.digest(number, without) == expected[number]
