"""How the channels of a problem are cut into parts for several workers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.problems import DTYPES

from bngrad_kernels.problem import channel_cuts
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec


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
