"""What every backend computes: right within the bounds, also for no elements, extreme numbers and non-finite ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.kernels.backends import CPU_SHAPES, CUDA_SHAPES, each, on_backends
from tests.kernels.problems import (
    DTYPES,
    KINDS,
    MODES,
    ORDERS,
    assert_right,
    bits_of_channels,
    first_order_problem,
    outputs,
    random_problem,
    second_order_problem,
    small_outputs,
    spec_of,
)

from bngrad_kernels.backend import Backend
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, ReserveSpace2Kind, Spec

SOME_SHAPES = [(40, 70, 1), (40, 72, 1), (40, 5, 9), (40, 5, 700)]


@pytest.mark.parametrize("is_training", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("backend", "order", "shape", "kind"),
    on_backends(
        cpu=each(ORDERS, CPU_SHAPES, KINDS),
        cuda=((order, shape, kind) for order in ORDERS
              for shape, kind in zip(CUDA_SHAPES[order], itertools.cycle(KINDS), strict=False)),
    ),
    indirect=["backend"],
)  # fmt: skip
def test_errors_are_within_their_bounds(
    backend: Backend, order: int, shape: tuple[int, ...], kind: ReserveSpace2Kind, dtype: Any, is_training: bool
) -> None:
    problem = random_problem(spec_of(order, shape, dtype, is_training=is_training, reserve_space_2_kind=kind))
    backend.run([problem])
    assert_right(problem)


@pytest.mark.parametrize(
    ("backend", "order", "seed"), on_backends([*each([1], range(60)), *each([2], range(30))]), indirect=["backend"]
)
def test_errors_are_within_their_bounds_for_any_shape(backend: Backend, order: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    inner = 1 if seed % 3 == 0 else int(rng.integers(1, 600))
    most = {1: (70, 140), 2: (40, 70)}[order]
    shape = int(rng.integers(1, most[0])), int(rng.integers(1, most[1])), inner
    epsilon = float(2.0 ** rng.integers(-20, 1)) if order == 2 else 1e-4
    spec = spec_of(order, shape, DTYPES[rng.integers(3)], is_training=seed % 2 == 0, epsilon=epsilon)
    problem = random_problem(spec, seed, has_scale=order == 2 or bool(rng.integers(2)))
    backend.run([problem])
    assert_right(problem)


@pytest.mark.parametrize("is_training", MODES)
@pytest.mark.parametrize("backend", on_backends(), indirect=True)
def test_statistics_may_be_bfloat16(backend: Backend, is_training: bool) -> None:
    problem = first_order_problem(Spec(BFLOAT16, (9, 70, 30), 1, stats_dtype=BFLOAT16, is_training=is_training))
    backend.run([problem])
    assert_right(problem)


@pytest.mark.parametrize("backend", on_backends(), indirect=True)
def test_bfloat16_statistics_are_rounded_once(backend: Backend) -> None:
    near_ties = np.array([[1, 1], [2**-8, 3 * 2**-8], [2**-40, -(2**-40)]], BFLOAT16)  # the sums are ties in float32
    ones = np.ones(2, BFLOAT16)
    problem = Problem.allocate(Spec(BFLOAT16, (3, 2), 1, stats_dtype=BFLOAT16), near_ties, near_ties, None, ones, ones)
    backend.run([problem])
    assert problem.offset_backprop.tolist() == [1 + 2**-7, 1 + 2**-7]


@pytest.mark.parametrize(
    ("backend", "order", "shape"),
    on_backends(
        cpu=each(ORDERS, [(2**20, 2, 1), (4, 2, 2**18), (2**15, 2, 32)]),
        cuda=[
            *each([1], [(2**18, 4, 1), (4, 2, 2**17), (2**14, 2, 32)]),
            *each([2], [(70_000, 16, 1), (1, 1, 1_100_000)]),  # several sections a group
        ],
    ),
    indirect=["backend"],
)
def test_a_mean_far_from_zero_and_many_elements_keep_the_bounds(
    backend: Backend, order: int, shape: tuple[int, ...]
) -> None:
    problem = random_problem(spec_of(order, shape))
    problem.x[...] = np.random.default_rng(1).normal(1000, 1, shape)
    problem.reserve_space_1[:] = problem.x.mean((0, 2), np.float64)
    problem.reserve_space_2[:] = problem.x.var((0, 2), np.float64)
    backend.run([problem])
    assert_right(problem)


@pytest.mark.parametrize(("order", "variance"), [(1, 1), (1, np.nan), (1, np.inf), (1, -1), (2, np.nan)])
@pytest.mark.parametrize("is_training", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("backend", "shape"),
    on_backends(
        zip([(0, 3, 4), (3, 4, 0), (2**58, 3, 0), (0, 3, 1), (0, 3, 600), (0, 700, 1), (0, 1, 1)], strict=True)
    ),
    indirect=["backend"],
)
def test_the_sums_over_nothing_are_zeros(
    backend: Backend, shape: tuple[int, ...], dtype: Any, is_training: bool, order: int, variance: float
) -> None:
    problem = random_problem(spec_of(order, shape, dtype, is_training=is_training))
    problem.reserve_space_2.fill(variance)
    backend.run([problem])
    for output in small_outputs(problem):
        assert not output.any()


@pytest.mark.parametrize(("backend", "order"), on_backends(zip(ORDERS, strict=True)), indirect=["backend"])
def test_no_channels_are_no_work(backend: Backend, order: int) -> None:
    problem = random_problem(spec_of(order, (9, 3, 4)))
    backend.run([random_problem(spec_of(order, (3, 0, 4))), problem])
    assert_right(problem)
    backend.run([])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_training", MODES)
@pytest.mark.parametrize(("backend", "shape"), on_backends(zip(SOME_SHAPES, strict=True)), indirect=["backend"])
def test_non_finite_inputs_affect_only_their_channel(
    backend: Backend, shape: tuple[int, ...], is_training: bool, poison: float
) -> None:
    spec = Spec(FLOAT32, shape, 1, is_training=is_training)
    clean, poisoned = first_order_problem(spec), first_order_problem(spec)
    poisoned.x[7, 2, 0] = poison
    poisoned.reserve_space_1[3] = poison
    poisoned.reserve_space_2[4] = poison
    backend.run([clean, poisoned])
    assert_other_channels_have_the_same_bits(clean, poisoned, [2, 3, 4])
    assert not np.isfinite(poisoned.scale_backprop[[2, 3]]).any()
    assert not is_training or not np.isfinite(poisoned.x_backprop[:, 2]).all()
    np.testing.assert_array_equal(poisoned.offset_backprop, clean.offset_backprop)  # depends on y_backprop alone


@pytest.mark.parametrize("is_training", MODES)
@pytest.mark.parametrize("name", ["grad_x_backprop", "y_backprop", "x"])
@pytest.mark.parametrize(
    ("backend", "shape", "poison", "place"),
    on_backends(
        cpu=each(SOME_SHAPES, [np.nan, np.inf, -np.inf], [0, 7]),
        cuda=((shape, *case) for shape in SOME_SHAPES for case in [(np.nan, 0), (np.inf, 0), (-np.inf, 7)]),
    ),
    indirect=["backend"],
)
def test_non_finite_inputs_of_the_second_order_affect_only_their_channel(
    backend: Backend, shape: tuple[int, ...], poison: float, place: int, name: str, is_training: bool
) -> None:
    spec = spec_of(2, shape, is_training=is_training)
    clean, poisoned = second_order_problem(spec), second_order_problem(spec)
    getattr(poisoned, name)[place, 2, 0] = poison
    backend.run([clean, poisoned])
    assert_other_channels_have_the_same_bits(clean, poisoned, [2])
    assert not all(np.isfinite(output).all() for output in outputs(poisoned))


def assert_other_channels_have_the_same_bits(clean: Any, poisoned: Any, channels: list[int]) -> None:
    others = np.setdiff1d(np.arange(clean.spec.channels), channels)
    for ours, theirs in zip(outputs(clean), outputs(poisoned), strict=True):
        assert bits_of_channels(ours, others) == bits_of_channels(theirs, others)


@pytest.mark.parametrize("backend", on_backends(), indirect=True)
def test_a_poisoned_x_does_not_affect_the_gradient_of_x_in_inference(backend: Backend) -> None:
    clean, poisoned = (second_order_problem(spec_of(2, (40, 5, 9), is_training=False)) for _ in range(2))
    poisoned.x[7, 2, 0] = np.nan
    backend.run([clean, poisoned])
    assert clean.grad_x.tobytes() == poisoned.grad_x.tobytes()
    assert clean.grad_scale.tobytes() == poisoned.grad_scale.tobytes()


@pytest.mark.parametrize("is_training", MODES)
@pytest.mark.parametrize("backend", on_backends(), indirect=True)
def test_an_infinite_variance_gives_zeros(backend: Backend, is_training: bool) -> None:
    problem = first_order_problem(Spec(FLOAT32, (40, 5, 9), 1, is_training=is_training))
    problem.reserve_space_2[2] = np.inf
    backend.run([problem])
    assert not problem.x_backprop[:, 2].any()
    assert problem.scale_backprop[2] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("backend", "order", "shape"),
    on_backends(each(ORDERS, [(40, 70, 1), (40, 72, 1), (4, 5, 300)])),
    indirect=["backend"],
)
def test_denormals_are_kept(backend: Backend, order: int, shape: tuple[int, ...], dtype: Any) -> None:
    kind = ReserveSpace2Kind.INVERSE_STD
    problem = random_problem(spec_of(order, shape, dtype, is_training=False, reserve_space_2_kind=kind))
    smallest = np.frombuffer(b"\x01" + bytes(dtype.itemsize - 1), dtype)[0]
    problem.y_backprop[...] = smallest
    if isinstance(problem, Problem):
        factor, output = problem.scale, problem.x_backprop
    else:
        factor, output = problem.grad_scale_backprop, problem.grad_x
    for vector in (factor, problem.reserve_space_2):
        assert vector is not None
        vector.fill(1)
    backend.run([problem])
    assert (output == smallest).all()


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("backend", on_backends(), indirect=True)
def test_narrow_outputs_are_rounded_to_nearest_even(backend: Backend, dtype: Any) -> None:
    spec = Spec(dtype, (65536, 1, 1), 1, is_training=False, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD)
    problem = first_order_problem(spec, has_scale=False)
    problem.y_backprop[:, 0, 0] = np.arange(65536).astype(np.uint16).view(dtype)  # every number of the dtype
    problem.reserve_space_2.fill(1 + 2**-8)
    with np.errstate(all="ignore"):
        expected = (problem.y_backprop.astype(np.float32) * np.float32(1 + 2**-8)).astype(dtype)
    backend.run([problem])
    np.testing.assert_array_equal(problem.x_backprop.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("first", [1e6, -3e18])
@pytest.mark.parametrize(
    ("backend", "shape"),
    on_backends(
        cpu=zip([(2**17, 3, 1), (4, 3, 2**15), (2**12, 3, 32), (50, 3, 1)], strict=True),
        cuda=zip([(2**15, 3, 1), (4, 3, 2**13), (2**10, 3, 32), (50, 3, 1)], strict=True),
    ),
    indirect=["backend"],
)
def test_a_first_element_that_is_an_outlier_keeps_the_bounds_and_the_bits_of_other_channels(
    backend: Backend, shape: tuple[int, ...], first: float
) -> None:
    problem, plain = second_order_problem(spec_of(2, shape)), second_order_problem(spec_of(2, shape))
    problem.x[0, 1, 0] = first  # the pivot, hundreds of standard deviations from the mean
    backend.run([problem])
    backend.run([plain])
    assert_right(problem)
    assert_other_channels_have_the_same_bits(plain, problem, [1])


@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
@pytest.mark.parametrize(
    ("backend", "shape"),
    on_backends(zip([(40, 70, 1), (40, 5, 600), (1, 5, 1), (1, 5, 600)], strict=True)),
    indirect=["backend"],
)
def test_a_constant_channel_has_no_variance(backend: Backend, shape: tuple[int, ...], value: float) -> None:
    problem = second_order_problem(spec_of(2, shape))
    problem.x.fill(value)
    backend.run([problem])
    assert_right(problem)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("backend", on_backends(), indirect=True)
def test_numbers_of_any_size_keep_the_bounds(backend: Backend, size: float) -> None:
    problem = second_order_problem(spec_of(2, (40, 70, 1)))
    problem.x *= np.float32(size)
    backend.run([problem])
    assert_right(problem)
