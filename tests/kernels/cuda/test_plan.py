from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.problems import DTYPES

from bngrad_kernels.cuda.kernel_selection import has_short_rows
from bngrad_kernels.cuda.plan import THREADS, VECTOR_NBYTES, Cut, cut
from bngrad_kernels.spec import FLOAT32, Spec

RESNET50 = [(64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7)]
SIZES = st.one_of(st.integers(0, 3000), st.integers(0, 2**33))


def group_nbytes(spec: Spec, planned: Cut) -> int:
    """Of y_backprop and x."""
    return 2 * planned.rows * planned.inner * planned.group_channels * spec.dtype.itemsize


@settings(max_examples=2000)
@given(outer=SIZES, channels=SIZES, inner=st.one_of(st.just(1), SIZES), dtype=st.sampled_from(DTYPES))
def test_every_cut_is_one_that_the_kernels_can_do(outer: int, channels: int, inner: int, dtype: Any) -> None:
    planned = cut(Spec(dtype, (outer, channels, inner), 1))
    assert planned.lanes * dtype.itemsize == VECTOR_NBYTES
    assert planned.rows * planned.inner == (outer * inner)
    assert 1 <= planned.group_channels <= THREADS
    assert planned.vectors == -(-planned.group_channels * planned.inner // planned.lanes)
    # Several channels: each lane of a thread stays in one column, and no column is without a thread.
    assert planned.group_channels == 1 or planned.sweep % planned.vectors == 0
    assert 1 <= planned.sweep <= THREADS
    assert planned.parts in {1, 2, 4, 8, 16, 32}
    assert planned.parts * planned.group_channels <= THREADS
    assert 1 <= planned.tile_steps <= 16
    slots, tile = planned.rows * planned.vectors, planned.tile_steps * planned.sweep
    assert planned.tiles >= 1
    assert planned.tiles * tile >= slots
    assert (planned.tiles - 1) * tile < max(slots, 1)


def test_the_cut_does_not_depend_on_how_a_shape_is_written() -> None:
    for dtype in DTYPES:
        nhwc = Spec(dtype, (32, 14, 14, 256), 3)
        assert cut(nhwc) == cut(Spec(dtype, (32 * 14 * 14, 256), 1, is_training=False, epsilon=1))
        nchw = Spec(dtype, (32, 256, 14, 14), 1)
        assert cut(nchw) == cut(Spec(dtype, (32, 256, 2, 7, 14), 1))


@pytest.mark.parametrize("batch", [32, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("channels", "side"), RESNET50)
def test_the_layers_of_resnet50_are_read_in_whole_vectors_and_long_runs_by_busy_threads(
    channels: int, side: int, channels_last: bool, dtype: Any, batch: int
) -> None:
    shape = (batch, side, side, channels) if channels_last else (batch, channels, side, side)
    spec = Spec(dtype, shape, 3 if channels_last else 1)
    planned = cut(spec)
    assert planned.is_vectorised(channels)
    row_nbytes = planned.group_channels * planned.inner * dtype.itemsize
    assert row_nbytes >= min(256, channels * dtype.itemsize)
    assert planned.sweep >= 0.9 * THREADS
    assert planned.groups(channels) * planned.tiles >= 32  # there is work for many processors
    assert has_short_rows(planned) == channels_last
    if not channels_last:
        assert group_nbytes(spec, planned) <= 28 << 20  # the second time, it is read from the cache


@pytest.mark.parametrize("steps", [1, 7, 8, 63, 264 * 5, 264 * 16, 264 * 17, 100_000])
def test_tiles_have_equal_steps_and_are_about_as_many_as_blocks_or_a_multiple(steps: int) -> None:
    planned = cut(Spec(FLOAT32, (steps * 16, 64), 1))  # a step of 256 threads takes 16 rows of 64 channels
    assert planned.sweep == THREADS
    assert planned.tile_steps <= 16
    assert (planned.tiles - 1) * planned.tile_steps < steps <= planned.tiles * planned.tile_steps
    if steps >= 264 * 8:
        waves = planned.tiles / 264
        assert waves > 0.9 * math.ceil(waves)
    else:
        assert planned.tile_steps >= min(steps, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whether_vectors_are_whole_depends_on_the_channels_there_are(dtype: Any) -> None:
    planned = cut(Spec(dtype, (100, 64), 1))
    assert [planned.is_vectorised(channels) for channels in (64, 8, 3)] == [True, True, False]


def test_elements_of_a_single_channel_are_one_run_in_either_layout() -> None:
    for dtype, shape in itertools.product(DTYPES, [(24, 1, 35), (840, 1, 1), (1, 1, 840)]):
        planned = cut(Spec(dtype, shape, 1))
        assert (planned.rows, planned.inner, planned.sweep) == (1, 840, THREADS)
