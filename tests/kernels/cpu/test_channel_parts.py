"""Problems computed in parts of their channels: to the same bits, and without touching the others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.cpu.parts import BACKENDS, POISON, SHAPES, assert_parts_are_the_whole, part_of, poisoned_problem
from tests.kernels.problems import DTYPES, outputs

from bngrad_kernels.problem import channel_cuts
from bngrad_kernels.spec import FLOAT32, Spec


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
    wholes, pieces = [poisoned_problem(spec) for spec in specs], [poisoned_problem(spec) for spec in specs]
    parts = [part_of(made, part) for made in pieces for part in channel_cuts(made.spec, 2)]
    BACKENDS[threads].run([*parts[::2], *wholes, *parts[1::2]])
    for whole, made in zip(wholes, pieces, strict=True):
        assert [a.tobytes() for a in outputs(made)] == [a.tobytes() for a in outputs(whole)], whole.spec


@pytest.mark.parametrize("shape", [(40, 70, 1), (4, 5, 300), (0, 7, 1)], ids=str)
def test_a_part_without_channels_writes_nothing(shape: tuple[int, ...]) -> None:
    made = part_of(poisoned_problem(Spec(FLOAT32, shape, 1)), range(3, 3))
    BACKENDS[2].run([made])
    assert all((output.view(np.uint8) == POISON).all() for output in outputs(made))


@pytest.mark.parametrize("channels", [range(-1, 3), range(3, 71), range(0, 70, 2)], ids=str)
def test_channels_that_are_not_there_are_refused(channels: range) -> None:
    with pytest.raises(ValueError, match="channels must be"):
        BACKENDS[1].run([part_of(poisoned_problem(Spec(FLOAT32, (40, 70, 1), 1)), channels)])
