"""The CUDA kernels of the second order, run on a CPU, against the float64 reference and against themselves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.unit.kernels.cuda.devices import backend
from tests.unit.kernels.problems import DTYPES, KINDS
from tests.unit.kernels.problems import bits as first_order_bits
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

from bngrad_kernels.problem import AnyProblem, Array, GradGradProblem
from bngrad_kernels.spec import ReserveSpace2Kind, Spec

GPU = backend()

SHAPES = [  # (N, C, inner)
    (4, 1, 1), (3, 5, 1), (1, 1, 1),  # less than a vector
    (33, 64, 1), (700, 104, 1),  # whole vectors, full and narrow last groups
    (200, 17, 1), (35, 300, 1),  # vectors that cannot be loaded in one piece
    (300, 5, 3), (40, 24, 9), (7, 100, 49), (9, 6, 196), (9, 3, 511),  # several channels a group
    (2, 3, 4000), (5, 2, 1023), (3, 1, 17),  # one channel a group
]  # fmt: skip
LONG = [(70_000, 16, 1), (1, 1, 1_100_000)]  # several tiles a strip


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "kind"), list(zip(SHAPES, itertools.cycle(KINDS), strict=False)), ids=str)
def test_errors_are_within_their_bounds(
    shape: tuple[int, ...], dtype: Any, is_training: bool, kind: ReserveSpace2Kind
) -> None:
    made = problem(second(shape, dtype, is_training=is_training, reserve_space_2_kind=kind))
    GPU.run([made])
    assert_right(made)


@pytest.mark.parametrize("shape", LONG, ids=str)
def test_errors_are_within_their_bounds_for_many_elements_far_from_zero(shape: tuple[int, ...]) -> None:
    made = problem(second(shape))
    made.x += np.float32(1000)
    GPU.run([made])
    assert_right(made)


@pytest.mark.parametrize("seed", range(30))
def test_errors_are_within_their_bounds_for_any_shape(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inner = 1 if seed % 3 == 0 else int(rng.integers(1, 600))
    shape = int(rng.integers(1, 40)), int(rng.integers(1, 70)), inner
    epsilon = float(2.0 ** rng.integers(-20, 1))
    made = problem(second(shape, DTYPES[rng.integers(3)], is_training=seed % 2 == 0, epsilon=epsilon), seed)
    GPU.run([made])
    assert_right(made)


@pytest.mark.parametrize(("blocks", "os_threads"), [(1, 1), (17, 4)])
def test_the_bits_do_not_depend_on_how_many_blocks_run(blocks: int, os_threads: int) -> None:
    specs = [second(shape, dtype) for dtype, shape in itertools.product(DTYPES, SHAPES)] + [second(LONG[0])]
    alike = [problem(spec) for spec in specs], [problem(spec) for spec in specs]
    GPU.run(alike[0])
    backend(blocks, os_threads).run(alike[1])
    assert [bits(made) for made in alike[0]] == [bits(made) for made in alike[1]]


def test_the_bits_do_not_depend_on_what_is_in_the_batch() -> None:
    cases = list(itertools.product(SHAPES, DTYPES, (True, False)))
    specs = [second(shape, dtype, is_training=mode) for shape, dtype, mode in cases]
    others = [first_order_problem(Spec(dtype, shape, 1, is_training=mode)) for shape, dtype, mode in cases]
    batch: list[AnyProblem] = [problem(spec) for spec in specs]
    GPU.run([*itertools.chain(*zip(batch, others, strict=True))])
    for spec, batched, other in zip(specs, batch, others, strict=True):
        alone, other_alone = problem(spec), first_order_problem(other.spec)
        GPU.run([alone])
        GPU.run([other_alone])
        assert isinstance(batched, GradGradProblem)
        assert bits(alone) == bits(batched), spec
        assert first_order_bits(other_alone) == first_order_bits(other), spec


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("channels_each", [1, 8, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_range_of_channels_has_the_bits_that_it_has_in_the_whole(
    dtype: Any, channels_each: int, is_training: bool
) -> None:
    for shape in [(33, 64, 1), (20, 104, 1), (40, 17, 1), (30, 5, 3), (7, 20, 9), (2, 3, 600)]:
        spec = second(shape, dtype, is_training=is_training)
        whole, cut = problem(spec), problem(spec)
        GPU.run([whole])
        backend(stream_nbytes=channels_each * (5 * spec.elements_per_channel * dtype.itemsize + 24)).run([cut])
        assert bits(whole) == bits(cut), spec


@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 72, 1), (6, 30, 49), (4, 9, 700), (0, 9, 4)], ids=str)
def test_a_part_of_the_channels_has_the_bits_of_the_whole_and_leaves_the_others_alone(shape: tuple[int, ...]) -> None:
    whole, untouched, part = (problem(second(shape)) for _ in range(3))
    GPU.run([whole])
    part.channels = range(2, 7)
    GPU.run([part])
    for expected, got, before in zip(outputs(whole), outputs(part), outputs(untouched), strict=True):
        axis = got.ndim // 2
        others = np.setdiff1d(np.arange(shape[1]), part.channels)
        assert np.take(got, part.channels, axis).tobytes() == np.take(expected, part.channels, axis).tobytes()
        assert np.take(got, others, axis).tobytes() == np.take(before, others, axis).tobytes()


@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 5, 9), (40, 5, 600)], ids=str)
def test_the_reserves_are_ignored_in_training(shape: tuple[int, ...]) -> None:
    made, other = problem(second(shape)), problem(second(shape))
    other.reserve_space_1.fill(np.nan)
    other.reserve_space_2.fill(np.nan)
    GPU.run([made, other])
    assert bits(made) == bits(other)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 4, 0), (0, 3, 1), (0, 3, 600), (0, 700, 1), (0, 1, 1)], ids=str)
def test_the_sums_over_nothing_are_zeros(shape: tuple[int, ...], dtype: Any, is_training: bool) -> None:
    made = problem(second(shape, dtype, is_training=is_training))
    made.reserve_space_2.fill(np.nan)
    GPU.run([made])
    assert not made.grad_scale.any()


def test_no_channels_are_no_work() -> None:
    made = problem(second((9, 3, 4)))
    GPU.run([problem(second((3, 0, 4))), made])
    assert_right(made)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", ["grad_x_backprop", "y_backprop", "x"])
@pytest.mark.parametrize(("poison", "place"), [(np.nan, 0), (np.inf, 0), (-np.inf, 7)])
@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 72, 1), (40, 5, 9), (40, 5, 600)], ids=str)
def test_what_is_not_finite_stays_in_its_channel(
    shape: tuple[int, ...], poison: float, place: int, name: str, is_training: bool
) -> None:
    assert_stays_in_its_channel(GPU, second(shape, is_training=is_training), name, place, poison)


def test_a_poisoned_x_leaves_the_gradient_of_x_alone_in_inference() -> None:
    assert_does_not_read_x_for_its_gradient(GPU)


@pytest.mark.parametrize("first", [1e6, -3e18])
@pytest.mark.parametrize("shape", [(2**15, 3, 1), (4, 3, 2**13), (2**10, 3, 32), (50, 3, 1)], ids=str)
def test_a_first_element_that_is_an_outlier_keeps_the_bounds(shape: tuple[int, ...], first: float) -> None:
    made = problem(second(shape))
    made.x[0, 1, 0] = first  # what x is measured from
    GPU.run([made])
    assert_right(made)


@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 5, 600), (1, 5, 1), (1, 5, 600)], ids=str)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
def test_a_constant_channel_has_no_variance(shape: tuple[int, ...], value: float) -> None:
    made = problem(second(shape))
    made.x.fill(value)
    GPU.run([made])
    assert_right(made)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_numbers_of_any_size_keep_the_bounds(size: float) -> None:
    made = problem(second((40, 70, 1)))
    made.x *= np.float32(size)
    GPU.run([made])
    assert_right(made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 70, 1), (40, 72, 1), (4, 5, 300)], ids=str)
def test_denormals_are_kept(shape: tuple[int, ...], dtype: Any) -> None:
    kind = ReserveSpace2Kind.INVERSE_STD
    made = problem(second(shape, dtype, is_training=False, reserve_space_2_kind=kind))
    smallest = np.frombuffer(b"\x01" + bytes(dtype.itemsize - 1), dtype)[0]
    made.y_backprop[...] = smallest
    for vector in (made.grad_scale_backprop, made.reserve_space_2):
        vector.fill(1)
    GPU.run([made])
    assert (made.grad_x == smallest).all()


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 7, 9), (33, 64, 1)], ids=str)
def test_unaligned_arrays_are_fine_and_nothing_beside_the_outputs_is_written(
    shape: tuple[int, ...], dtype: Any, is_training: bool
) -> None:
    made = problem(second(shape, dtype, is_training=is_training))
    GPU.run([made])

    def placed(array: Array) -> tuple[Array, Array]:
        memory = np.full(array.nbytes + 128, 0xAB, np.uint8)
        inside = memory[63 : 63 + array.nbytes].view(array.dtype).reshape(array.shape)
        inside[...] = array
        return inside, memory

    places = [placed(array) for array in (*inputs(made), *outputs(made))]
    moved = GradGradProblem(made.spec, *(inside for inside, _ in places))
    for output in outputs(moved):
        output.fill(np.nan)
    GPU.run([moved])
    assert bits(moved) == bits(made)
    for inside, memory in places:
        assert (memory[:63] == 0xAB).all()
        assert (memory[63 + inside.nbytes :] == 0xAB).all()
