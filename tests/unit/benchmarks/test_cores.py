"""The benchmark that tells how far apart cores are."""

from __future__ import annotations

import os

import pytest
from benchmarks import bench_cores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_cores_have_a_distance_and_the_thread_may_run_on_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cores, "_ROUNDS", 100)
    before = os.sched_getaffinity(0)
    assert bench_cores.distance_ns(*sorted(before)[:2]) > 1
    assert os.sched_getaffinity(0) == before
