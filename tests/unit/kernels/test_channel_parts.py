"""Problems computed in parts of their channels: to the same bits, and without touching the others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bngrad_kernels import backends
from bngrad_kernels.problem import Array, Problem, channel_cuts
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec

DTYPES = [FLOAT32, BFLOAT16, FLOAT16]
BACK_ENDS = {threads: backends.create("cpu", threads=threads) for threads in (1, 2)}
POISON = 0xA5

SHAPES = [  # (outer, C, inner): folded rows with and without a short last one, long rows, small planes, long planes
    (33, 64, 1), (5000, 64, 1), (4001, 6, 1), (203, 100, 1), (35, 1500, 1), (130, 2048, 1), (1, 40, 1),
    (300, 5, 3), (7, 100, 49), (32, 70, 49), (9, 13, 127), (1, 7, 129), (3, 9, 17), (9, 3, 196), (4, 5, 20_000),
]  # fmt: skip


def problem(spec: Spec, seed: int = 0) -> Problem:
    """A problem of random numbers with poisoned outputs."""
    rng = np.random.default_rng(seed)
    tensors = [rng.normal(0.5, 2, spec.shape).astype(spec.dtype) for _ in range(2)]
    stats = [rng.uniform(0.5, 2, spec.channels).astype(spec.stats_dtype) for _ in range(3)]
    made = Problem.allocate(spec, tensors[0], tensors[1], *stats)
    memory = np.empty(spec.tensor_nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64  # large tensors are streamed past the caches if they are aligned
    made.x_backprop = memory[start : start + spec.tensor_nbytes].view(spec.dtype).reshape(spec.shape)
    for output in outputs(made):
        output.view(np.uint8)[...] = POISON
    return made


def outputs(problem: Problem) -> tuple[Array, Array, Array]:
    return problem.x_backprop, problem.scale_backprop, problem.offset_backprop


def part_of(problem: Problem, channels: range) -> Problem:
    """The same arrays, for some channels only."""
    return Problem(
        problem.spec, problem.y_backprop, problem.x, problem.scale, problem.reserve_space_1, problem.reserve_space_2,
        *outputs(problem), channels=channels,
    )  # fmt: skip


def assert_parts_are_the_whole(spec: Spec, cuts: list[int], threads: int, seed: int = 0) -> None:
    """Computes a problem at once and part by part, and looks at every byte of the outputs after each part."""
    whole, pieces = problem(spec, seed), problem(spec, seed)
    BACK_ENDS[threads].run([whole])
    expected = [output.copy() for output in outputs(pieces)]
    bounds = sorted({0, *cuts, spec.channels})
    for first, last in itertools.pairwise(bounds):
        BACK_ENDS[threads].run([part_of(pieces, range(first, last))])
        for array, right in zip(expected, outputs(whole), strict=True):
            channels = (slice(None),) * (spec.channel_axis if array.ndim > 1 else 0) + (slice(first, last),)
            array[channels] = right[channels]
        assert [a.tobytes() for a in outputs(pieces)] == [a.tobytes() for a in expected], (first, last)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_have_the_bits_of_the_whole_and_touch_nothing_else(
    shape: tuple[int, int, int], dtype: Any, is_training: bool, threads: int
) -> None:
    channels = shape[1]
    spec = Spec(dtype, shape, 1, is_training=is_training)
    assert_parts_are_the_whole(spec, [1, channels // 3, channels // 2 // 16 * 16, channels - 1], threads)


@settings(max_examples=150, deadline=None)
@given(
    outer=st.integers(0, 300),
    channels=st.integers(1, 140),
    inner=st.one_of(st.just(1), st.integers(1, 200)),
    dtype=st.sampled_from(DTYPES),
    is_training=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_any_split_of_any_problem_has_the_bits_of_the_whole(
    outer: int, channels: int, inner: int, dtype: Any, is_training: bool, threads: int, seed: int, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, channels), max_size=4))
    spec = Spec(dtype, (outer, channels, inner), 1, is_training=is_training)
    assert_parts_are_the_whole(spec, cuts, threads, seed)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 112, 112, 64), 3), ((70_000, 96), 1), ((4096, 1024), 1), ((8, 64, 112, 112), 1)], ids=str
)
def test_large_tensors_have_the_bits_of_the_whole(shape: tuple[int, ...], axis: int, dtype: Any, threads: int) -> None:
    spec = Spec(dtype, shape, axis)
    assert_parts_are_the_whole(spec, [part.start for part in channel_cuts(spec, 3)], threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_call_may_mix_parts_and_wholes(threads: int) -> None:
    specs = [Spec(dtype, shape, 1) for dtype, shape in itertools.product(DTYPES, SHAPES)]
    wholes, pieces = [problem(spec) for spec in specs], [problem(spec) for spec in specs]
    parts = [part_of(made, part) for made in pieces for part in channel_cuts(made.spec, 2)]
    BACK_ENDS[threads].run([*parts[::2], *wholes, *parts[1::2]])
    for whole, made in zip(wholes, pieces, strict=True):
        assert [a.tobytes() for a in outputs(made)] == [a.tobytes() for a in outputs(whole)], whole.spec


@pytest.mark.parametrize("shape", [(40, 70, 1), (4, 5, 300), (0, 7, 1)], ids=str)
def test_a_part_without_channels_writes_nothing(shape: tuple[int, ...]) -> None:
    made = part_of(problem(Spec(FLOAT32, shape, 1)), range(3, 3))
    BACK_ENDS[2].run([made])
    assert all((output.view(np.uint8) == POISON).all() for output in outputs(made))


@pytest.mark.parametrize("channels", [range(-1, 3), range(3, 71), range(0, 70, 2)], ids=str)
def test_channels_that_are_not_there_are_refused(channels: range) -> None:
    with pytest.raises(ValueError, match="channels must be"):
        BACK_ENDS[1].run([part_of(problem(Spec(FLOAT32, (40, 70, 1), 1)), channels)])


@given(
    outer=st.integers(0, 9),
    channels=st.integers(0, 3000),
    inner=st.integers(0, 5000),
    dtype=st.sampled_from(DTYPES),
    parts=st.integers(1, 9),
)
def test_cuts_cover_every_channel_once(outer: int, channels: int, inner: int, dtype: Any, parts: int) -> None:
    cuts = channel_cuts(Spec(dtype, (outer, channels, inner), 1), parts)
    assert [channel for part in cuts for channel in part] == list(range(channels))
    assert 1 <= len(cuts) <= parts
    assert all(len(part) > 0 for part in cuts) or channels == 0


@pytest.mark.parametrize(
    ("spec", "parts", "expected"),
    [
        (Spec(FLOAT32, (32, 112, 112, 64), 3), 2, [range(32), range(32, 64)]),
        (Spec(BFLOAT16, (32, 112, 112, 64), 3), 4, [range(32), range(32, 64)]),
        (Spec(FLOAT32, (32, 112, 112, 24), 3), 2, [range(16), range(16, 24)]),
        (Spec(FLOAT16, (32, 112, 112, 24), 3), 2, [range(24)]),
        (Spec(FLOAT32, (32, 2048, 7, 7), 1), 2, [range(1024), range(1024, 2048)]),
        (Spec(FLOAT32, (2, 3, 224, 224), 1), 2, [range(1), range(1, 3)]),
    ],
    ids=str,
)
def test_cuts_lie_between_cache_lines(spec: Spec, parts: int, expected: list[range]) -> None:
    assert channel_cuts(spec, parts) == expected
