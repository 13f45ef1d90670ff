"""Tensors that are prefetched, which depends on the processor and its caches: the same bits as others."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.kernels.problems import DTYPES, bits, random_problem, spec_of

from bngrad_kernels import backends, machine
from bngrad_kernels.cpu import plan
from bngrad_kernels.cpu.plan import RECORD
from bngrad_kernels.spec import BFLOAT16, FLOAT32

TWO_THREADS = backends.create("cpu", threads=2)
SHAPES = [(700, 64, 1), (300, 200, 1), (200, 2080, 1), (99, 33, 1), (3, 5, 513), (4, 3, 1055), (9, 2, 4097)]


@contextmanager
def far_from(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_FAR_FROM_NBYTES", nbytes)
        patch.setattr(plan, "_PLANES_FAR_FROM_NBYTES", nbytes)
        patch.setattr(plan, "_FAR_NBYTES", 9216)  # whatever this processor likes
        patch.setattr(plan, "_PLANES_FAR_NBYTES", 6144)
        plan.plan.cache_clear()
        yield
    plan.plan.cache_clear()


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_prefetched_has_the_bits_of_what_is_not(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: Any, is_training: bool
) -> None:
    spec = spec_of(1, shape, dtype, is_training=is_training)
    near, far = random_problem(spec), random_problem(spec)
    for made, nbytes in ((near, 2**62), (far, 0)):
        with far_from(monkeypatch, nbytes):
            planned = plan.plan(spec)
            has_far = not (planned.geometry.is_short and dtype == FLOAT32)
            assert bool(np.frombuffer(planned.record, RECORD)["far"][0]) == (made is far and has_far)
            TWO_THREADS.run([made])
    assert bits(far) == bits(near)


@pytest.mark.parametrize("short_near", [0, 1024])
@pytest.mark.parametrize("prefetches_sums", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_short_rows_have_the_same_bits_however_far_they_are_prefetched(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, prefetches_sums: bool, short_near: int
) -> None:
    spec = spec_of(1, (4099, 64, 1), dtype)
    made, other = random_problem(spec), random_problem(spec)
    TWO_THREADS.run([other])
    near = (short_near if dtype == FLOAT32 else 3072) // dtype.itemsize
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_SHORT_NEAR_NBYTES", short_near)
        patch.setattr(plan, "_PREFETCHES_SHORT_SUMS", prefetches_sums)
        plan.plan.cache_clear()
        record = np.frombuffer(plan.plan(spec).record, RECORD)
        assert (record["near"][0], record["sums_near"][0]) == (near, near if prefetches_sums else 0)
        TWO_THREADS.run([made])
    plan.plan.cache_clear()
    assert bits(made) == bits(other)


@pytest.mark.parametrize(
    ("model", "is_far", "is_short"),
    [
        pytest.param(("GenuineIntel", 6, 85), False, True, id="Skylake"),
        pytest.param(("GenuineIntel", 6, 207), True, True, id="another Xeon"),
        pytest.param(("AuthenticAMD", 25, 17), True, False, id="EPYC"),
        pytest.param(("", 0, 0), True, False, id="Arm"),
    ],
)
def test_how_far_is_prefetched_depends_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, model: tuple[str, int, int], is_far: bool, is_short: bool
) -> None:
    monkeypatch.setattr(machine, "model", lambda: model)
    constants = runpy.run_path(plan.__file__)
    assert [constants[name] > 0 for name in ("_FAR_NBYTES", "_PLANES_FAR_NBYTES")] == [is_far, is_far]
    assert (constants["_SHORT_NEAR_NBYTES"] > 0, constants["_PREFETCHES_SHORT_SUMS"]) == (is_short, is_short)
