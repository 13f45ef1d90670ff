"""The benchmark that tries other constants of the CPU kernels' plan."""

from __future__ import annotations

import argparse

import pytest
from benchmarks import bench_plan
from benchmarks.kernels.cases import Case

from bngrad_kernels.cpu import plan as plans
from bngrad_kernels.cpu.backend import CpuBackend

CASE = Case("NHWC", "float32", (64, 8, 8))


def test_every_contestant_is_timed_and_the_plan_is_as_before() -> None:
    before = plans.plan(CASE.spec)
    medians = bench_plan._medians(CpuBackend(1), CASE, [{}, {"_NEAR_NBYTES": 0}, {"_FAR_FROM_NBYTES": 0}], seconds=0)
    assert len(medians) == 3
    assert min(medians) > 0
    assert plans.plan(CASE.spec) == before


def test_constants_that_change_the_bits_are_refused() -> None:
    with pytest.raises(SystemExit, match="change the bits"):
        bench_plan._medians(CpuBackend(1), CASE, [{}, {"_MIN_COLUMNS": 256}], seconds=0)


@pytest.mark.parametrize("text", ["NO_SUCH=1", "plan=1", "_FAR_NBYTES=x", "_FAR_NBYTES"])
def test_what_is_no_number_of_the_plan_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="number"):
        bench_plan._assignment(text)
