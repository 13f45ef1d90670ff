"""The CUDA kernels, run on a CPU, against the float64 reference and against themselves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.unit.kernels.cuda.devices import backend
from tests.unit.kernels.problems import DTYPES, KINDS, assert_right, bits, outputs, problem

from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT32, ReserveSpace2Kind, Spec

GPU = backend()

SHAPES = [  # (N, C, inner)
    (4, 1, 1), (3, 5, 1), (1, 1, 1),  # less than a vector
    (33, 64, 1), (200, 16, 1), (5000, 64, 1), (700, 104, 1), (2, 2048, 1),  # whole vectors, full and narrow last groups
    (1000, 3, 1), (200, 17, 1), (35, 1500, 1),  # vectors that cannot be loaded in one piece
    (4, 5, 2), (300, 5, 3), (40, 64, 2), (40, 24, 9), (32, 64, 49), (32, 70, 49), (7, 100, 49),  # several channels
    (9, 3, 127), (9, 3, 128), (9, 6, 196), (9, 3, 511),  # rows that hardly fit the threads
    (2, 3, 4000), (40, 3, 1024), (40, 2, 1023), (1, 1, 100_003), (3, 1, 17),  # one channel a group
    (70_000, 16, 1), (1, 2, 1_100_000),  # several tiles a strip
]  # fmt: skip


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "kind"), list(zip(SHAPES, itertools.cycle(KINDS), strict=False)), ids=str)
def test_errors_are_within_their_bounds(
    shape: tuple[int, ...], dtype: Any, is_training: bool, kind: ReserveSpace2Kind
) -> None:
    made = problem(Spec(dtype, shape, 1, is_training=is_training, reserve_space_2_kind=kind))
    GPU.run([made])
    assert_right(made)


@pytest.mark.parametrize("seed", range(60))
def test_errors_are_within_their_bounds_for_any_shape(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inner = 1 if seed % 3 == 0 else int(rng.integers(1, 600))
    shape = int(rng.integers(1, 70)), int(rng.integers(1, 140)), inner
    made = problem(
        Spec(DTYPES[rng.integers(3)], shape, 1, is_training=seed % 2 == 0), seed, has_scale=bool(rng.integers(2))
    )
    GPU.run([made])
    assert_right(made)


@pytest.mark.parametrize("is_training", [True, False])
def test_statistics_may_be_bfloat16(is_training: bool) -> None:
    made = problem(Spec(BFLOAT16, (9, 70, 30), 1, stats_dtype=BFLOAT16, is_training=is_training))
    GPU.run([made])
    assert_right(made)


@pytest.mark.parametrize(("blocks", "os_threads"), [(1, 1), (2, 2), (17, 4)])
def test_the_bits_do_not_depend_on_how_many_blocks_run(blocks: int, os_threads: int) -> None:
    specs = [Spec(dtype, shape, 1) for dtype, shape in itertools.product(DTYPES, SHAPES)]
    alike = [problem(spec) for spec in specs], [problem(spec) for spec in specs]
    GPU.run(alike[0])
    backend(blocks, os_threads).run(alike[1])
    assert [bits(made) for made in alike[0]] == [bits(made) for made in alike[1]]


def test_the_bits_do_not_depend_on_the_engine() -> None:
    specs = [Spec(dtype, shape, 1) for dtype, shape in itertools.product(DTYPES, SHAPES)]
    alike = [problem(spec) for spec in specs], [problem(spec) for spec in specs]
    GPU.run(alike[0])
    backend(is_streamed=True).run(alike[1])
    assert [bits(made) for made in alike[0]] == [bits(made) for made in alike[1]]


def test_the_bits_do_not_depend_on_what_is_in_the_batch() -> None:
    specs = [Spec(dtype, shape, 1, is_training=is_training)
             for dtype, shape, is_training in itertools.product(DTYPES, SHAPES, (True, False))]  # fmt: skip
    batch = [problem(spec) for spec in specs]
    GPU.run(batch)
    for spec, batched in zip(specs, batch, strict=True):
        alone = problem(spec)
        GPU.run([alone])
        assert bits(alone) == bits(batched), spec


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("channels_each", [1, 3, 8, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_range_of_channels_has_the_bits_that_it_has_in_the_whole(
    dtype: Any, channels_each: int, is_training: bool
) -> None:
    for shape in [shape for shape in SHAPES if 1 < shape[1] <= 104 and shape[0] < 10_000 and shape[2] < 10_000]:
        spec = Spec(dtype, shape, 1, is_training=is_training)
        whole, cut = problem(spec), problem(spec)
        GPU.run([whole])
        backend(stream_nbytes=channels_each * (3 * spec.elements_per_channel * dtype.itemsize + 20)).run([cut])
        assert bits(whole) == bits(cut), spec


@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 72, 1), (6, 30, 49), (4, 9, 700), (0, 9, 4)], ids=str)
def test_a_part_of_the_channels_has_the_bits_of_the_whole_and_leaves_the_others_alone(shape: tuple[int, ...]) -> None:
    whole, untouched, part = (problem(Spec(FLOAT32, shape, 1)) for _ in range(3))
    GPU.run([whole])
    part.channels = range(2, 7)
    GPU.run([part])
    for expected, got, before in zip(outputs(whole), outputs(part), outputs(untouched), strict=True):
        axis = got.ndim // 2
        others = np.setdiff1d(np.arange(shape[1]), part.channels)
        assert np.take(got, part.channels, axis).tobytes() == np.take(expected, part.channels, axis).tobytes()
        assert np.take(got, others, axis).tobytes() == np.take(before, others, axis).tobytes()
    part.channels = range(0)
    GPU.run([part])


@pytest.mark.parametrize("variance", [1, np.nan, np.inf, -1])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 4, 0), (0, 3, 1), (0, 3, 600), (0, 700, 1), (0, 1, 1)], ids=str)
def test_the_sums_over_nothing_are_zeros(
    shape: tuple[int, ...], dtype: Any, is_training: bool, variance: float
) -> None:
    made = problem(Spec(dtype, shape, 1, is_training=is_training))
    made.reserve_space_2.fill(variance)
    GPU.run([made])
    assert not made.scale_backprop.any()
    assert not made.offset_backprop.any()


def test_no_channels_are_no_work() -> None:
    made = problem(Spec(FLOAT32, (9, 3, 4), 1))
    GPU.run([problem(Spec(FLOAT32, (3, 0, 4), 1)), made])
    assert_right(made)
    GPU.run([])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 72, 1), (40, 5, 9), (40, 5, 700)], ids=str)
def test_what_is_not_finite_stays_in_its_channel(shape: tuple[int, ...], is_training: bool, poison: float) -> None:
    spec = Spec(FLOAT32, shape, 1, is_training=is_training)
    made, poisoned = problem(spec), problem(spec)
    poisoned.x[7, 2, 0] = poison
    poisoned.reserve_space_1[3] = poison
    poisoned.reserve_space_2[4] = poison
    GPU.run([made, poisoned])
    others = np.setdiff1d(np.arange(shape[1]), [2, 3, 4])
    for clean, dirty in zip(outputs(made), outputs(poisoned), strict=True):
        axis = clean.ndim // 2
        assert np.take(clean, others, axis).tobytes() == np.take(dirty, others, axis).tobytes()
    assert not np.isfinite(poisoned.scale_backprop[[2, 3]]).any()
    np.testing.assert_array_equal(poisoned.offset_backprop, made.offset_backprop)  # it depends on y_backprop alone


@pytest.mark.parametrize("is_training", [True, False])
def test_an_infinite_variance_gives_zeros(is_training: bool) -> None:
    made = problem(Spec(FLOAT32, (40, 5, 9), 1, is_training=is_training))
    made.reserve_space_2[2] = np.inf
    GPU.run([made])
    assert not made.x_backprop[:, 2].any()
    assert made.scale_backprop[2] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 72, 1), (4, 5, 300)], ids=str)
def test_denormals_are_kept(shape: tuple[int, ...], dtype: Any) -> None:
    made = problem(Spec(dtype, shape, 1, is_training=False, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD))
    smallest = np.frombuffer(b"\x01" + bytes(dtype.itemsize - 1), dtype)[0]
    made.y_backprop[...] = smallest
    for vector in (made.scale, made.reserve_space_2):
        assert vector is not None
        vector.fill(1)
    GPU.run([made])
    assert (made.x_backprop == smallest).all()


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each.itemsize == 2], ids=str)
def test_narrow_outputs_are_rounded_to_nearest_even(dtype: Any) -> None:
    spec = Spec(dtype, (65536, 1, 1), 1, is_training=False, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD)
    made = problem(spec, has_scale=False)
    made.y_backprop[:, 0, 0] = np.arange(65536).astype(np.uint16).view(dtype)  # every number there is
    made.reserve_space_2.fill(1 + 2**-8)
    with np.errstate(all="ignore"):
        expected = (made.y_backprop.astype(np.float32) * np.float32(1 + 2**-8)).astype(dtype)
    GPU.run([made])
    np.testing.assert_array_equal(made.x_backprop.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("shape", [(2**18, 4, 1), (4, 2, 2**17), (2**14, 2, 32)], ids=str)
def test_a_mean_far_from_zero_and_many_elements_keep_the_bounds(shape: tuple[int, ...]) -> None:
    made = problem(Spec(FLOAT32, shape, 1))
    made.x[...] = np.random.default_rng(1).normal(1000, 1, shape)
    made.reserve_space_1[:] = made.x.mean((0, 2), np.float64)
    made.reserve_space_2[:] = made.x.var((0, 2), np.float64)
    GPU.run([made])
    assert_right(made)


def test_nothing_beside_the_outputs_is_written() -> None:
    made = problem(Spec(FLOAT32, (33, 7, 9), 1))
    GPU.run([made])
    memory = [np.full(array.nbytes + 128, 0xAB, np.uint8) for array in outputs(made)]
    inside = [whole[63:-65].view(np.float32) for whole in memory]  # unaligned on purpose
    inputs = (made.y_backprop, made.x, made.scale, made.reserve_space_1, made.reserve_space_2)
    moved = Problem(made.spec, *inputs, inside[0].reshape(made.spec.shape), *inside[1:])
    GPU.run([moved])
    assert bits(moved) == bits(made)
    for whole in memory:
        assert (whole[:63] == 0xAB).all()
        assert (whole[-65:] == 0xAB).all()
