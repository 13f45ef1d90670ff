from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.problems import DTYPES

from bngrad_kernels.cuda.kernel_selection import is_read_from_cache
from bngrad_kernels.cuda.plan import THREADS, VECTOR_NBYTES, Cut, cut
from bngrad_kernels.spec import Spec

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
    assert 4 <= planned.chain <= 32
    assert 1 <= planned.tiles <= 256
    slots, tile = planned.rows * planned.vectors, planned.segments * planned.chain * planned.sweep
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
    assert planned.group_channels * planned.inner * dtype.itemsize >= 64
    assert planned.sweep >= 0.9 * THREADS
    assert planned.groups(channels) * planned.tiles >= 64  # there is work for many processors
    if not channels_last:
        assert group_nbytes(spec, planned) <= 28 << 20  # the second time, it is read from the cache


def test_channels_last_groups_are_narrowed_where_that_makes_them_fit_the_cache() -> None:
    for dtype in DTYPES:
        wide, narrow, large, huge = (Spec(dtype, (batch, 28, 28, 128), 3) for batch in (64, 128, 512, 1024))
        assert [cut(spec).group_channels * dtype.itemsize for spec in (wide, narrow, large, huge)] == [128, 64, 64, 128]
        assert group_nbytes(narrow, cut(narrow)) <= 14 << 20  # of an A100's or H100's
        assert is_read_from_cache(group_nbytes(large, cut(large)), 126 << 20)  # of a B200's


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whether_vectors_are_whole_depends_on_the_channels_there_are(dtype: Any) -> None:
    planned = cut(Spec(dtype, (100, 64), 1))
    assert [planned.is_vectorised(channels) for channels in (64, 8, 3)] == [True, True, False]


def test_elements_of_a_single_channel_are_one_run_in_either_layout() -> None:
    for dtype, shape in itertools.product(DTYPES, [(24, 1, 35), (840, 1, 1), (1, 1, 840)]):
        planned = cut(Spec(dtype, shape, 1))
        assert (planned.rows, planned.inner, planned.sweep) == (1, 840, THREADS)
