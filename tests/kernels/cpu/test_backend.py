"""The CPU backend's own properties: its threads and their scratch memory, and any shape that Hypothesis finds."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.backends import CPU_SHAPES, create, each
from tests.kernels.problems import (
    DTYPES,
    ORDERS,
    assert_right,
    bits,
    first_order_problem,
    random_problem,
    second_order_problem,
    spec_of,
)

from bngrad_kernels import backends
from bngrad_kernels.problem import channel_cuts
from bngrad_kernels.spec import FLOAT32, Spec

ONE_THREAD, TWO_THREADS = backends.create("cpu", threads=1), create("cpu")
LARGE_SHAPES = {1: [(20_000, 64, 1), (64, 64, 3136)], 2: [(40_000, 80, 1), (16, 64, 3136), (40, 300, 300)]}


@settings(max_examples=120, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    outer=st.integers(1, 70),
    channels=st.integers(1, 140),
    inner=st.integers(1, 260),
    dtype=st.sampled_from(DTYPES),
    is_training=st.booleans(),
    has_scale=st.booleans(),
    epsilon=st.floats(2**-20, 1, width=32),
    seed=st.integers(0, 2**32),
)
def test_errors_are_within_their_bounds_for_any_shape(
    order: int, outer: int, channels: int, inner: int, dtype: Any, is_training: bool, has_scale: bool, epsilon: float,
    seed: int,
) -> None:  # fmt: skip
    spec = spec_of(order, (outer, channels, inner), dtype, is_training=is_training, epsilon=epsilon)
    problem = random_problem(spec, seed, has_scale=has_scale)
    TWO_THREADS.run([problem])
    assert_right(problem)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_workspace_that_could_not_grow_is_not_taken_for_a_larger_one(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backends.create("cpu", threads=1)
    backend.run([random_problem(spec_of(1, (2, 64, 1)))])
    large = random_problem(spec_of(1, (1, 200_000, 1)))
    with monkeypatch.context() as patch:
        patch.setattr("bngrad_kernels.cpu.backend.np.empty", mock.Mock(side_effect=error))
        with pytest.raises(error):
            backend.run([large])
    after = random_problem(spec_of(1, (1, 150_000, 1)))
    backend.run([after])
    assert_right(after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("order", "shape"), [(order, shape) for order in ORDERS for shape in [*CPU_SHAPES, *LARGE_SHAPES[order]]], ids=str
)
def test_the_bits_do_not_depend_on_the_threads(order: int, shape: tuple[int, ...], dtype: Any) -> None:
    spec = spec_of(order, shape, dtype)
    problem, again = random_problem(spec), random_problem(spec)
    ONE_THREAD.run([problem])
    TWO_THREADS.run([again])
    assert bits(problem) == bits(again)


@pytest.mark.parametrize("first", [1e6, -3e18])
@pytest.mark.parametrize("shape", [(2**17, 3, 1), (4, 3, 2**15), (2**12, 3, 32), (50, 3, 1)], ids=str)
def test_the_bits_do_not_depend_on_the_threads_where_sums_are_taken_twice(shape: tuple[int, ...], first: float) -> None:
    problem, again = second_order_problem(spec_of(2, shape)), second_order_problem(spec_of(2, shape))
    problem.x[0, 1, 0] = again.x[0, 1, 0] = first
    ONE_THREAD.run([problem])
    TWO_THREADS.run([again])
    assert bits(problem) == bits(again)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_very_many_channels_need_little_scratch_memory_and_have_the_same_bits(order: int, dtype: Any) -> None:
    spec = spec_of(order, (2, 400_000, 1), dtype)
    whole, again = random_problem(spec), random_problem(spec)
    tracemalloc.start()
    try:
        TWO_THREADS.run([whole])
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    for part in channel_cuts(spec, 40):
        again.channels = part
        ONE_THREAD.run([again])
        again.prepared = None
    assert bits(whole) == bits(again)


def test_flushing_of_subnormal_numbers_in_the_calling_thread_changes_no_bit() -> None:
    problem, again = (first_order_problem(spec_of(1, (40, 64, 9))) for _ in range(2))
    for each_problem in (problem, again):
        each_problem.y_backprop *= 1e-38
    ONE_THREAD.run([problem])
    torch.set_flush_denormal(True)
    try:
        ONE_THREAD.run([again])
        still_flushes = float(torch.tensor(1e-38) * 0.1) == 0
    finally:
        torch.set_flush_denormal(False)
    assert still_flushes
    assert bits(problem) == bits(again)


def test_each_backend_computes_a_problem_itself() -> None:
    problem = first_order_problem(spec_of(1, LARGE_SHAPES[1][0]))
    for computing in (ONE_THREAD, TWO_THREADS, ONE_THREAD):
        problem.x_backprop[...] = 0
        computing.run([problem])
        assert problem.prepared.backend is computing
        assert problem.x_backprop.any()


def test_the_bits_of_a_batch_do_not_depend_on_the_threads() -> None:
    specs = [spec_of(order, shape, dtype) for dtype, shape, order in each(DTYPES, CPU_SHAPES, ORDERS)]
    batch, again = [random_problem(spec) for spec in specs], [random_problem(spec) for spec in specs]
    ONE_THREAD.run(batch)
    TWO_THREADS.run(again)
    assert [bits(problem) for problem in batch] == [bits(problem) for problem in again]


def test_the_first_problem_of_a_thread_may_need_no_scratch_memory() -> None:
    problem = first_order_problem(Spec(FLOAT32, (0, 3, 4), 1, is_training=False))
    backends.create("cpu", threads=1).run([problem])
    assert not problem.offset_backprop.any()


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(700, 100, 1), (20_000, 64, 1), (35, 1500, 1), (32, 70, 49), (300, 5, 3), (9, 6, 196)], ids=str
)
def test_parts_of_the_channels_have_the_bits_of_the_whole_where_sums_are_taken_twice(
    shape: tuple[int, ...], dtype: Any, is_training: bool
) -> None:
    spec = spec_of(2, shape, dtype, is_training=is_training)
    whole, parts = second_order_problem(spec), second_order_problem(spec)
    whole.x[0, 3, 0] = parts.x[0, 3, 0] = 3e4  # the sums are taken twice, in one part alone
    TWO_THREADS.run([whole])
    cut = shape[1] // 3 + 1
    for channels in (range(cut, shape[1]), range(cut)):
        TWO_THREADS.run([dataclasses.replace(parts, channels=channels, prepared=None)])
    assert bits(parts) == bits(whole)
