"""NumPy has the bits of the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels import backends
from tests.kernels.cpu import fixed_bits
from tests.kernels.problems import DTYPES, KINDS, MODES, ORDERS, clear_outputs, outputs, random_problem, spec_of

from bngrad_kernels.cpu import CpuBackend
from bngrad_kernels.cpu.uncompiled import first_order, second_order
from bngrad_kernels.cpu.uncompiled.backend import compute
from bngrad_kernels.problem import AnyProblem
from bngrad_kernels.spec import BFLOAT16, FLOAT16

Change: TypeAlias = Callable[[AnyProblem, np.random.Generator], None]


class InNumpy(CpuBackend):
    """A backend that never compiles."""

    def run(self, problems: Sequence[AnyProblem]) -> None:
        for problem in problems:
            compute(problem)


def test_the_problems_whose_bits_are_the_same_on_every_processor_have_them() -> None:
    numbers = [number for number in range(0, fixed_bits.PROBLEMS, 4) if number % 100 > 2]  # those are large
    expected = fixed_bits.expected()
    assert [fixed_bits.digest(number, InNumpy()) for number in numbers] == [expected[number] for number in numbers]


@st.composite
def problems(draw: st.DrawFn) -> AnyProblem:
    """Of usual numbers, any bits, sums that cancel, and channels that begin far from their means."""
    shape = draw(st.tuples(st.integers(0, 40), st.integers(0, 9), st.sampled_from([1, 1, 2, 9, 49, 128, 300])))
    dtype = draw(st.sampled_from(DTYPES))
    spec = spec_of(
        draw(st.sampled_from(ORDERS)), shape, dtype,
        stats_dtype=draw(st.sampled_from([dtype, np.dtype(np.float32)])) if dtype == BFLOAT16 else np.dtype(np.float32),
        is_training=draw(st.sampled_from(MODES)),
        reserve_space_2_kind=draw(st.sampled_from(KINDS)),
        epsilon=draw(st.sampled_from([0.0, 1e-4])),
    )  # fmt: skip
    made = random_problem(spec, draw(st.integers(0, 99)), has_scale=draw(st.booleans()))
    change = draw(st.sampled_from([some_bits, all_bits, cancelling, with_outliers, projected_away, lambda *_: None]))
    change(made, np.random.default_rng(draw(st.integers(0, 99))))
    if draw(st.booleans()) and spec.channels:
        start = draw(st.integers(0, spec.channels - 1))
        made.channels = range(start, draw(st.integers(start, spec.channels)))
    return made


def some_bits(problem: AnyProblem, rng: np.random.Generator, share: float = 0.1) -> None:
    """Puts any bits into a share of the elements: subnormal, huge and non-finite numbers too."""
    for name in (*problem.large_inputs, *problem.small_inputs):
        if (array := getattr(problem, name)) is not None:
            bits = rng.integers(0, 256, array.nbytes, np.uint8).view(array.dtype).reshape(array.shape)
            np.copyto(array, bits, where=rng.random(array.shape) < share)


def all_bits(problem: AnyProblem, rng: np.random.Generator) -> None:
    some_bits(problem, rng, share=1)


def cancelling(problem: AnyProblem, rng: np.random.Generator) -> None:
    """Has the sums consist of what was rounded, and so depend on the order of every addition."""
    spec = problem.spec
    exponents = 8 if spec.dtype == FLOAT16 else 40
    half = spec.elements_per_channel // 2
    for name in set(problem.large_inputs) - {"x"}:
        values = rng.normal(size=(spec.channels, spec.elements_per_channel))
        values *= 2.0 ** rng.integers(-exponents, exponents, values.shape)
        values[:, half : 2 * half] = -rng.permuted(values[:, :half], axis=1)
        values = values.reshape(spec.channels, spec.outer, spec.inner).swapaxes(0, 1)
        getattr(problem, name)[...] = values.reshape(spec.shape).astype(spec.dtype)
    problem.x[...] = 1 + rng.integers(0, 2, (1, spec.channels, 1)) * rng.integers(0, 2, spec.shape)
    problem.reserve_space_1[...] = 0


def projected_away(problem: AnyProblem, rng: np.random.Generator) -> None:
    """Has the second order's grad_scale consist of what was rounded: the projection of x is 0."""
    if rng.integers(2):
        with_outliers(problem, rng)
    problem.y_backprop[...] = problem.x


def with_outliers(problem: AnyProblem, rng: np.random.Generator) -> None:
    """Has the second order take its sums twice."""
    problem.x[:1, :, :1] = 6e4 if problem.spec.dtype == FLOAT16 else rng.choice([1e4, 1e7])


@given(problems())
def test_any_problem_has_the_bits_of_the_compiled_kernels(problem: AnyProblem) -> None:
    assert_same_bits(problem)


def test_without_elements_the_sums_are_zeros_even_if_the_statistics_are_not_finite() -> None:
    problem = random_problem(spec_of(1, (0, 4, 3)))
    problem.reserve_space_2[...] = np.nan
    assert_same_bits(problem)


@pytest.mark.parametrize("change", [cancelling, projected_away])
@pytest.mark.parametrize("shape", [(40, 2, 4000), (3, 2, 50_000), (5000, 64, 1), (300, 60, 9)], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_many_tiles_and_pieces_have_the_bits_of_the_compiled_kernels(
    order: int, shape: tuple[int, ...], change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(spec_of(order, shape))
    change(problem, np.random.default_rng(0))
    for module in (first_order, second_order):
        monkeypatch.setattr(module, "_CHUNK", 3000)
    assert_same_bits(problem)


def assert_same_bits(problem: AnyProblem) -> None:
    backends.create("cpu").run([problem])
    expected = [output.copy() for output in outputs(problem)]
    clear_outputs(problem)
    compute(problem)
    for found, wanted in zip(outputs(problem), expected, strict=True):
        is_nan = np.isnan(wanted.astype(np.float32))  # of which the bits may differ
        np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), is_nan)
        assert found[~is_nan].tobytes() == wanted[~is_nan].tobytes()
