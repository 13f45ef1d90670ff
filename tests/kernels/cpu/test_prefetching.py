"""Tensors that are prefetched, which depends on the processor's caches: the same bits as others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.kernels.problems import DTYPES, bits, random_problem, spec_of

from bngrad_kernels import backends
from bngrad_kernels.cpu import plan
from bngrad_kernels.cpu.plan import RECORD

TWO_THREADS = backends.create("cpu", threads=2)
SHAPES = [(700, 64, 1), (300, 200, 1), (200, 2080, 1), (99, 33, 1), (3, 5, 513), (4, 3, 1055), (9, 2, 4097)]


@contextmanager
def far_from(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_FAR_FROM_NBYTES", nbytes)
        patch.setattr(plan, "_PLANES_FAR_FROM_NBYTES", nbytes)
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
            assert bool(np.frombuffer(plan.plan(spec).record, RECORD)["far"][0]) == (made is far)
            TWO_THREADS.run([made])
    assert bits(far) == bits(near)
