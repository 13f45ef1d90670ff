"""The CPU back end against the float64 reference, and against itself."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.kernels.problems import DTYPES, KINDS, assert_right, bits, outputs, problem

from bngrad_kernels import backends
from bngrad_kernels.problem import Array, Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, ReserveSpace2Kind, Spec

TWO_THREADS = backends.create("cpu", threads=2)

SHAPES = [  # (N, C, inner): full and broken vectors, rows, bands and tiles of both kernels
    (4, 1, 1), (3, 5, 1), (1, 1, 1),
    (1000, 3, 1), (33, 64, 1), (5000, 64, 1), (200, 17, 1), (700, 100, 1), (2, 2048, 1),
    (35, 1500, 1), (4, 5, 2), (3, 7, 9), (300, 5, 3), (7, 100, 49), (32, 70, 49), (9, 3, 127), (9, 3, 128), (1, 7, 129),
    (3, 1, 17), (9, 3, 196), (2, 3, 4000), (40, 3, 1024), (1, 1, 100_003), (3, 7, 50_000),
]  # fmt: skip


def bits_of(spec: Spec, threads: int, **changes: Any) -> list[bytes]:
    made = problem(spec, **changes)
    backends.create("cpu", threads=threads).run([made])
    return bits(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_within_their_bounds(
    shape: tuple[int, ...], dtype: Any, is_training: bool, kind: ReserveSpace2Kind
) -> None:
    made = problem(Spec(dtype, shape, 1, is_training=is_training, reserve_space_2_kind=kind))
    TWO_THREADS.run([made])
    assert_right(made)


@settings(max_examples=60, deadline=None)
@given(
    outer=st.integers(1, 70),
    channels=st.integers(1, 140),
    inner=st.integers(1, 260),
    dtype=st.sampled_from(DTYPES),
    is_training=st.booleans(),
    has_scale=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_errors_are_within_their_bounds_for_any_shape(
    outer: int, channels: int, inner: int, dtype: Any, is_training: bool, has_scale: bool, seed: int
) -> None:
    made = problem(Spec(dtype, (outer, channels, inner), 1, is_training=is_training), seed, has_scale)
    TWO_THREADS.run([made])
    assert_right(made)


def test_statistics_may_be_bfloat16() -> None:
    made = problem(Spec(BFLOAT16, (9, 70, 30), 1, stats_dtype=BFLOAT16))
    TWO_THREADS.run([made])
    assert_right(made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (20_000, 64, 1), (64, 64, 3136)], ids=str)
def test_the_bits_do_not_depend_on_the_threads(shape: tuple[int, ...], dtype: Any) -> None:
    spec = Spec(dtype, shape, 1)
    assert bits_of(spec, threads=1) == bits_of(spec, threads=2)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_bits_do_not_depend_on_what_is_in_the_batch(threads: int) -> None:
    specs = [Spec(dtype, shape, 1) for dtype, shape in itertools.product(DTYPES, SHAPES)]
    batch = [problem(spec) for spec in specs]
    backends.create("cpu", threads=threads).run(batch)
    assert [bits(made) for made in batch] == [bits_of(spec, threads) for spec in specs]


@pytest.mark.parametrize("variance", [1, np.nan, np.inf, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 4, 0), (0, 3, 1), (0, 3, 500), (0, 700, 1)], ids=str)
def test_the_sums_over_nothing_are_zeros(shape: tuple[int, ...], dtype: Any, variance: float) -> None:
    made = problem(Spec(dtype, shape, 1))
    made.reserve_space_2.fill(variance)
    TWO_THREADS.run([made])
    assert not made.scale_backprop.any()
    assert not made.offset_backprop.any()


def test_the_first_problem_of_a_thread_may_need_no_scratch_memory() -> None:
    made = problem(Spec(FLOAT32, (0, 3, 4), 1, is_training=False))
    backends.create("cpu", threads=1).run([made])
    assert not made.offset_backprop.any()


def test_no_channels_are_no_work() -> None:
    TWO_THREADS.run([problem(Spec(FLOAT32, (3, 0, 4), 1))])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 5, 9), (40, 5, 300)], ids=str)
def test_what_is_not_finite_stays_in_its_channel(shape: tuple[int, ...], poison: float) -> None:
    made, poisoned = problem(Spec(FLOAT32, shape, 1)), problem(Spec(FLOAT32, shape, 1))
    poisoned.x[7, 2, 0] = poison
    poisoned.reserve_space_2[3] = poison
    TWO_THREADS.run([made, poisoned])
    others = np.setdiff1d(np.arange(shape[1]), [2, 3])
    for clean, dirty in zip(outputs(made), outputs(poisoned), strict=True):
        axis = clean.ndim // 2
        assert np.take(clean, others, axis).tobytes() == np.take(dirty, others, axis).tobytes()
    assert not np.isfinite(poisoned.x_backprop[:, 2]).all()
    np.testing.assert_array_equal(poisoned.offset_backprop, made.offset_backprop)  # it depends on y_backprop alone


def test_an_infinite_variance_gives_zeros() -> None:
    made = problem(Spec(FLOAT32, (40, 5, 9), 1))
    made.reserve_space_2[2] = np.inf
    TWO_THREADS.run([made])
    assert not made.x_backprop[:, 2].any()
    assert made.scale_backprop[2] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 70, 1), (4, 5, 300)], ids=str)
def test_denormals_are_kept(shape: tuple[int, ...], dtype: Any) -> None:
    made = problem(Spec(dtype, shape, 1, is_training=False, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD))
    smallest = np.frombuffer(b"\x01" + bytes(dtype.itemsize - 1), dtype)[0]
    made.y_backprop[...] = smallest
    for vector in (made.scale, made.reserve_space_2):
        assert vector is not None
        vector.fill(1)
    TWO_THREADS.run([made])
    assert (made.x_backprop == smallest).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_narrow_outputs_are_rounded_to_nearest_even(dtype: Any) -> None:
    spec = Spec(dtype, (65536, 1, 1), 1, is_training=False, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD)
    made = problem(spec, has_scale=False)
    made.y_backprop[:, 0, 0] = np.arange(65536).astype(np.uint16).view(dtype)  # every number there is
    made.reserve_space_2.fill(1 + 2**-8)
    with np.errstate(all="ignore"):
        expected = (made.y_backprop.astype(np.float32) * np.float32(1 + 2**-8)).astype(dtype)
    TWO_THREADS.run([made])
    np.testing.assert_array_equal(made.x_backprop.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("shape", [(2**20, 2, 1), (4, 2, 2**18), (2**15, 2, 32)], ids=str)
def test_a_mean_far_from_zero_and_a_million_elements_keep_the_bounds(shape: tuple[int, ...]) -> None:
    made = problem(Spec(FLOAT32, shape, 1))
    made.x[...] = np.random.default_rng(1).normal(1000, 1, shape)
    made.reserve_space_1[:] = made.x.mean((0, 2), np.float64)
    made.reserve_space_2[:] = made.x.var((0, 2), np.float64)
    TWO_THREADS.run([made])
    assert_right(made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 70, 1), (33, 64, 1), (7, 5, 9), (3, 5, 300)], ids=str)
@pytest.mark.parametrize("shift", [0, 1, 7])
def test_unaligned_arrays_are_fine_and_nothing_beside_the_outputs_is_written(
    shape: tuple[int, ...], dtype: Any, shift: int
) -> None:
    made = problem(Spec(dtype, shape, 1))
    TWO_THREADS.run([made])

    def placed(array: Array) -> tuple[Array, Array]:
        memory = np.full(array.nbytes + 256, 0xAB, np.uint8)
        inside = memory[64 + shift :][: array.nbytes].view(array.dtype).reshape(array.shape)
        inside[...] = array
        return inside, memory

    inputs = (made.y_backprop, made.x, made.scale, made.reserve_space_1, made.reserve_space_2)
    places = [placed(array) for array in (*inputs, *outputs(made)) if array is not None]
    moved = Problem(made.spec, *(inside for inside, _ in places))
    for output in outputs(moved):
        output.fill(np.nan)
    TWO_THREADS.run([moved])
    assert bits(moved) == bits(made)
    for inside, memory in places:
        assert (memory[: 64 + shift] == 0xAB).all()
        assert (memory[64 + shift + inside.nbytes :] == 0xAB).all()
