"""The second order on the CPU against the float64 reference, and against itself."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.kernels.problems import DTYPES, KINDS
from tests.unit.kernels.problems import problem as first_order_problem
from tests.unit.kernels.second_order import (
    assert_does_not_read_x_for_its_gradient,
    assert_right,
    assert_stays_in_its_channel,
    bits,
    inputs,
    outputs,
    problem,
    second,
)
from tests.unit.kernels.test_cpu_backend import SHAPES

from bngrad_kernels import backends
from bngrad_kernels.problem import Array, GradGradProblem
from bngrad_kernels.spec import ReserveSpace2Kind, Spec

ONE_THREAD, TWO_THREADS = (backends.create("cpu", threads=threads) for threads in (1, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_within_their_bounds(
    shape: tuple[int, ...], dtype: Any, is_training: bool, kind: ReserveSpace2Kind
) -> None:
    made = problem(second(shape, dtype, is_training=is_training, reserve_space_2_kind=kind))
    TWO_THREADS.run([made])
    assert_right(made)


@settings(max_examples=60, deadline=None)
@given(
    outer=st.integers(1, 70),
    channels=st.integers(1, 140),
    inner=st.integers(1, 260),
    dtype=st.sampled_from(DTYPES),
    is_training=st.booleans(),
    epsilon=st.floats(2**-20, 1, width=32),
    seed=st.integers(0, 2**32),
)
def test_errors_are_within_their_bounds_for_any_shape(
    outer: int, channels: int, inner: int, dtype: Any, is_training: bool, epsilon: float, seed: int
) -> None:
    made = problem(second((outer, channels, inner), dtype, is_training=is_training, epsilon=epsilon), seed)
    TWO_THREADS.run([made])
    assert_right(made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (40_000, 80, 1), (16, 64, 3136), (40, 300, 300)], ids=str)
def test_the_bits_do_not_depend_on_the_threads(shape: tuple[int, ...], dtype: Any) -> None:
    made, again = problem(second(shape, dtype)), problem(second(shape, dtype))
    ONE_THREAD.run([made])
    TWO_THREADS.run([again])
    assert bits(made) == bits(again)


@pytest.mark.parametrize("backend", [ONE_THREAD, TWO_THREADS], ids=["one thread", "two threads"])
def test_the_bits_do_not_depend_on_what_is_in_the_batch(backend: Any) -> None:
    specs = [second(shape, dtype) for dtype, shape in itertools.product(DTYPES, SHAPES)]
    batch, alone = [problem(spec) for spec in specs], [problem(spec) for spec in specs]
    others = [first_order_problem(Spec(spec.dtype, spec.shape, 1)) for spec in specs]
    others_alone = [first_order_problem(Spec(spec.dtype, spec.shape, 1)) for spec in specs]
    backend.run([*itertools.chain(*zip(batch, others, strict=True))])
    for made in (*alone, *others_alone):
        backend.run([made])
    assert [bits(made) for made in batch] == [bits(made) for made in alone]
    assert [made.x_backprop.tobytes() for made in others] == [made.x_backprop.tobytes() for made in others_alone]


@pytest.mark.parametrize("ignored", [np.nan, 1e30])
@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 5, 9), (40, 5, 300)], ids=str)
def test_the_reserves_are_ignored_in_training(shape: tuple[int, ...], ignored: float) -> None:
    made, other = problem(second(shape)), problem(second(shape))
    other.reserve_space_1.fill(ignored)
    other.reserve_space_2.fill(ignored)
    TWO_THREADS.run([made, other])
    assert bits(made) == bits(other)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 4, 0), (0, 3, 1), (0, 3, 500), (0, 700, 1)], ids=str)
def test_the_sums_over_nothing_are_zeros(shape: tuple[int, ...], dtype: Any, is_training: bool) -> None:
    made = problem(second(shape, dtype, is_training=is_training))
    made.reserve_space_2.fill(np.nan)
    TWO_THREADS.run([made])
    assert not made.grad_scale.any()


def test_no_channels_are_no_work() -> None:
    TWO_THREADS.run([problem(second((3, 0, 4)))])


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", ["grad_x_backprop", "y_backprop", "x"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 5, 9), (40, 5, 300)], ids=str)
def test_what_is_not_finite_stays_in_its_channel(
    shape: tuple[int, ...], place: int, poison: float, name: str, is_training: bool
) -> None:
    assert_stays_in_its_channel(TWO_THREADS, second(shape, is_training=is_training), name, place, poison)


def test_a_poisoned_x_leaves_the_gradient_of_x_alone_in_inference() -> None:
    assert_does_not_read_x_for_its_gradient(TWO_THREADS)


@pytest.mark.parametrize("shape", [(2**20, 2, 1), (4, 2, 2**18), (2**15, 2, 32)], ids=str)
def test_a_mean_far_from_zero_and_a_million_elements_keep_the_bounds(shape: tuple[int, ...]) -> None:
    made = problem(second(shape))
    made.x[...] = np.random.default_rng(1).normal(1000, 1, shape)
    TWO_THREADS.run([made])
    assert_right(made)


@pytest.mark.parametrize("first", [1e6, -3e18])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(2**17, 3, 1), (4, 3, 2**15), (2**12, 3, 32), (50, 3, 1)], ids=str)
def test_a_first_element_that_is_an_outlier_keeps_the_bounds_and_the_bits_of_other_channels(
    shape: tuple[int, ...], threads: int, first: float
) -> None:
    made, plain = problem(second(shape)), problem(second(shape))
    made.x[0, 1, 0] = first  # what x is measured from, hundreds of standard deviations from the mean
    for each in (made, plain):
        backends.create("cpu", threads=threads).run([each])
    assert_right(made)
    for ours, theirs in zip(outputs(made), outputs(plain), strict=True):
        axis = ours.ndim // 2
        assert np.take(ours, [0, 2], axis).tobytes() == np.take(theirs, [0, 2], axis).tobytes()


@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 5, 300), (1, 5, 1), (1, 5, 300)], ids=str)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
def test_a_constant_channel_has_no_variance(shape: tuple[int, ...], value: float) -> None:
    made = problem(second(shape))
    made.x.fill(value)
    TWO_THREADS.run([made])
    assert_right(made)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_numbers_of_any_size_keep_the_bounds(size: float) -> None:
    made = problem(second((40, 70, 1)))
    made.x *= np.float32(size)
    TWO_THREADS.run([made])
    assert_right(made)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 70, 1), (33, 64, 1), (7, 5, 9), (3, 5, 300)], ids=str)
@pytest.mark.parametrize("shift", [0, 1, 7])
def test_unaligned_arrays_are_fine_and_nothing_beside_the_outputs_is_written(
    shape: tuple[int, ...], dtype: Any, shift: int, is_training: bool
) -> None:
    made = problem(second(shape, dtype, is_training=is_training))
    TWO_THREADS.run([made])

    def placed(array: Array) -> tuple[Array, Array]:
        memory = np.full(array.nbytes + 256, 0xAB, np.uint8)
        inside = memory[64 + shift :][: array.nbytes].view(array.dtype).reshape(array.shape)
        inside[...] = array
        return inside, memory

    places = [placed(array) for array in (*inputs(made), *outputs(made))]
    moved = GradGradProblem(made.spec, *(inside for inside, _ in places))
    for output in outputs(moved):
        output.fill(np.nan)
    TWO_THREADS.run([moved])
    assert bits(moved) == bits(made)
    for inside, memory in places:
        assert (memory[: 64 + shift] == 0xAB).all()
        assert (memory[64 + shift + inside.nbytes :] == 0xAB).all()


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(700, 100, 1), (20_000, 64, 1), (35, 1500, 1), (32, 70, 49), (300, 5, 3), (9, 6, 196)], ids=str
)
def test_parts_of_the_channels_have_the_bits_of_the_whole(
    shape: tuple[int, ...], dtype: Any, is_training: bool
) -> None:
    spec = second(shape, dtype, is_training=is_training)
    whole, parts = problem(spec), problem(spec)
    whole.x[0, 3, 0] = parts.x[0, 3, 0] = 3e4  # sums that are taken twice, in one part alone
    TWO_THREADS.run([whole])
    cut = shape[1] // 3 + 1
    for channels in (range(cut, shape[1]), range(cut)):
        TWO_THREADS.run([dataclasses.replace(parts, channels=channels, prepared=None)])
    assert bits(parts) == bits(whole)
