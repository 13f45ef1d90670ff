"""Outputs written with non-temporal stores: the same bits in the same places as with ordinary ones."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import pytest
from tests.kernels.cpu.parts import SHAPES as SHAPES_OF_PARTS
from tests.kernels.cpu.parts import assert_parts_are_the_whole
from tests.kernels.problems import DTYPES, ORDERS, random_problem, spec_of

from bngrad_kernels import backends
from bngrad_kernels.cpu import plan, simd
from bngrad_kernels.cpu.plan import LANES, LINE, RECORD
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import Spec

TWO_THREADS = backends.create("cpu", threads=2)
SHAPES = [
    *[(70, 64, 1), (9, 1056, 1), (200, 2080, 1)],  # columns, each row of which is whole cache lines
    *[(3, 5, 512), (3, 5, 513), (4, 3, 1055), (9, 2, 4097), (1, 2, 40_007)],  # planes that begin anywhere
]
SHIFTS = [0, 64, 4]
"""In bytes; the last one leaves the output unaligned to cache lines, so that it cannot be streamed."""


@contextmanager
def streaming_from(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_STREAM_FROM_NBYTES", {2: nbytes, 4: nbytes})
        patch.setattr(plan, "_STREAM_TRAINING_FROM_NBYTES", 0)
        plan.plan.cache_clear()
        yield
    plan.plan.cache_clear()


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_streamed_outputs_have_the_bits_of_others_and_nothing_beside_them_is_written(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: Any, order: int, is_training: bool, shift: int
) -> None:
    spec = spec_of(order, shape, dtype, is_training=is_training)
    made, streamed = random_problem(spec), random_problem(spec)
    names = made.large_outputs
    with streaming_from(monkeypatch, 2**62):
        TWO_THREADS.run([made])
    written = [getattr(made, name) for name in names]
    places = [place(each, shift) for each in written]
    for name, (inside, _) in zip(names, places, strict=True):
        setattr(streamed, name, inside)
    with streaming_from(monkeypatch, 0):
        assert np.frombuffer(plan.plan(spec).record, RECORD)["streams"] == 1
        TWO_THREADS.run([streamed])
    for before, (inside, memory) in zip(written, places, strict=True):
        assert inside.tobytes() == before.tobytes()
        start = inside.ctypes.data - memory.ctypes.data
        assert (memory[:start] == 0xAB).all()
        assert (memory[start + inside.nbytes :] == 0xAB).all()


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *SHAPES_OF_PARTS], ids=str)
def test_streamed_parts_have_the_bits_of_the_whole_and_touch_nothing_else(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], dtype: Any, is_training: bool
) -> None:
    channels = shape[1]
    spec = Spec(dtype, shape, 1, is_training=is_training)
    with streaming_from(monkeypatch, 0):
        assert_parts_are_the_whole(spec, [1, channels // 3, channels // 2 // 32 * 32, channels - 1], threads=2)


def place(array: Array, shift: int) -> tuple[Array, Array]:
    """An array of the same kind, ``shift`` bytes after the start of a second cache line; and the memory around it."""
    memory = np.full(array.nbytes + 512, 0xAB, np.uint8)
    start = -memory.ctypes.data % 128 + 128 + shift
    return memory[start:][: array.nbytes].view(array.dtype).reshape(array.shape), memory


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for an instruction of x86")
@pytest.mark.parametrize("tag", simd.TAGS.values(), ids=lambda tag: str(tag.dtype))
def test_every_type_has_a_non_temporal_store(tag: Any) -> None:
    def scale(tag: Any, source: int, target: int, count: int) -> None:
        gain = simd.load(np.float32(0), source, count)
        for i in range(0, count, LINE):
            low, high = simd.load(tag, source, i), simd.load(tag, source, i + LANES)
            simd.stream(tag, target, i, simd.mul(gain, low), simd.mul(gain, high))

    compiled = numba.njit(scale)
    compiled.compile((numba.typeof(tag), *[numba.int64] * 3))
    assert "movnt" in compiled.inspect_asm(compiled.signatures[0])
