"""TensorFlow, PyTorch and oneDNN as oracles: the same numbers but for rounding, and errors no larger than theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.peers import UnsupportedError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integration.problems import Inputs, random_inputs
from tests.oracles import agreement

import bngrad
from bngrad_kernels.problem import Array
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, ReserveSpace2Kind, Spec

DTYPES = [FLOAT32, BFLOAT16, FLOAT16]
FOUR_D = [((4, 5, 6, 7), 3), ((4, 7, 5, 6), 1), ((3, 1, 1, 1), 3), ((1, 1, 7, 9), 1), ((2, 33, 17, 3), 3)]
FIVE_D = [((2, 3, 4, 5, 6), 4), ((2, 6, 3, 4, 5), 1)]
TWO_AND_THREE_D = [((50, 4), 1), ((9, 4, 6), 1), ((9, 4, 6), 2)]

_CPU = frozenset(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
_NEEDED = {FLOAT32: frozenset[str](), BFLOAT16: frozenset({"avx512bw"}), FLOAT16: frozenset({"avx512_fp16"})}
"""What oneDNN asks of the processor for each dtype."""

REFUSED: dict[str, Callable[[Spec], bool]] = {
    # The Eigen kernel, which takes what oneDNN inside TensorFlow does not: 5-D, and dtypes.
    "tensorflow": lambda spec: (
        not spec.is_training
        and spec.channel_axis == 1
        and (len(spec.shape) == 5 or spec.dtype == FLOAT16 or not _NEEDED[spec.dtype] <= _CPU)
    ),
    "pytorch": lambda spec: False,
    "onednn": lambda spec: not _NEEDED[spec.dtype] <= _CPU,
    "onednn-graph": lambda spec: spec.dtype == FLOAT16 or not spec.is_training or not _NEEDED[spec.dtype] <= _CPU,
}
"""What each oracle does not compute; bngrad computes all of it."""


def _assert_agreement_or_refusal(peer: str, spec: Spec, inputs: Inputs, ours: tuple[Array, ...]) -> None:
    if REFUSED[peer](spec):
        with pytest.raises(UnsupportedError):
            agreement.asked_of(peer, spec, inputs)
    else:
        agreement.assert_agreement(spec, inputs, ours, agreement.asked_of(peer, spec, inputs))


ORACLES = [
    (peer, shape, axis, is_training)
    for peer in REFUSED
    for shape, axis in [*FOUR_D, *FIVE_D, *(TWO_AND_THREE_D if peer in ("pytorch", "onednn") else [])]
    for is_training in ([True, False] if len(shape) >= 4 else [True])  # the op for fewer dimensions knows only training
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("peer", "shape", "axis", "is_training"), ORACLES)
def test_every_case_that_an_oracle_computes_agrees(
    client: bngrad.Client, peer: str, shape: tuple[int, ...], axis: int, is_training: bool, dtype: Any
) -> None:
    spec = Spec(dtype, shape, axis, is_training=is_training, epsilon=1e-3)
    inputs = random_inputs(spec)
    ours = agreement.asked_of_bngrad(client, spec, inputs)
    _assert_agreement_or_refusal(peer, spec, inputs, ours)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [*FOUR_D, *FIVE_D])
def test_the_op_of_onednn_agrees_with_onednn_graph(
    client: bngrad.Client, shape: tuple[int, ...], axis: int, dtype: Any
) -> None:
    spec = Spec(dtype, shape, axis, epsilon=1e-5)
    inputs = random_inputs(spec)
    ours = agreement.asked_of_bngrad_as_onednn(client, spec, inputs)
    _assert_agreement_or_refusal("onednn-graph", spec, inputs, ours)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_inverse_standard_deviation_that_pytorch_saves_may_be_sent(client: bngrad.Client, dtype: Any) -> None:
    spec = Spec(dtype, (4, 7, 5, 6), 1, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD)
    inputs = random_inputs(spec)
    ours = agreement.asked_of_bngrad(client, spec, inputs)
    agreement.assert_agreement(spec, inputs, ours, agreement.asked_of("pytorch", spec, inputs))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_the_op_of_onednn_takes_the_inverse_standard_deviation_too(client: bngrad.Client, dtype: Any) -> None:
    spec = Spec(dtype, (4, 7, 5, 6), 1, epsilon=1e-3)
    inputs = random_inputs(spec)
    inverse_std = 1 / np.sqrt(inputs.reserve_space_2 + np.float32(spec.epsilon))
    saved = dataclasses.replace(spec, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD)
    ours = agreement.asked_of_bngrad_as_onednn(client, saved, inputs._replace(reserve_space_2=inverse_std))
    _assert_agreement_or_refusal("onednn-graph", spec, inputs, ours)


@settings(max_examples=40, deadline=None)
@given(
    peer=st.sampled_from([*REFUSED]),
    dtype=st.sampled_from(DTYPES),
    dimensions=st.lists(st.integers(1, 9), min_size=3, max_size=4),
    channels=st.integers(1, 70),
    channels_last=st.booleans(),
    is_training=st.booleans(),
    epsilon=st.floats(2**-20, 1, width=32),
    seed=st.integers(0, 2**32),
)
def test_random_calls_agree(
    client: bngrad.Client,
    peer: str,
    dtype: Any,
    dimensions: list[int],
    channels: int,
    channels_last: bool,
    is_training: bool,
    epsilon: float,
    seed: int,
) -> None:
    axis = len(dimensions) if channels_last else 1
    shape = (*dimensions[:axis], channels, *dimensions[axis:])
    spec = Spec(dtype, shape, axis, is_training=is_training, epsilon=epsilon)
    inputs = random_inputs(spec, seed)
    ours = agreement.asked_of_bngrad(client, spec, inputs)
    if not REFUSED[peer](spec):
        agreement.assert_agreement(spec, inputs, ours, agreement.asked_of(peer, spec, inputs))


@pytest.mark.parametrize("peer", REFUSED)
@pytest.mark.parametrize(("shape", "axis"), [((16, 256, 256, 2), 3), ((16, 2, 256, 256), 1)])
def test_a_mean_far_from_zero_and_a_million_elements_cost_no_more_than_they_cost_the_oracle(
    client: bngrad.Client, peer: str, shape: tuple[int, ...], axis: int
) -> None:
    spec = Spec(FLOAT32, shape, axis)
    x = np.random.default_rng(1).normal(1000, 1, shape).astype(np.float32)
    axes = tuple(a for a in range(4) if a != axis)
    inputs = random_inputs(spec)._replace(
        x=x,
        reserve_space_1=x.mean(axes, np.float64).astype(np.float32),
        reserve_space_2=x.var(axes, np.float64).astype(np.float32),
    )
    ours = agreement.asked_of_bngrad(client, spec, inputs)
    agreement.assert_no_less_exact(spec, inputs, ours, agreement.asked_of(peer, spec, inputs))


@pytest.mark.parametrize("peer", ["tensorflow", "pytorch"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_leads_to_the_oracles_non_finite_values_in_the_same_channel(
    client: bngrad.Client, peer: str, poison: float
) -> None:
    spec = Spec(FLOAT32, (4, 5, 6, 7), 3)
    inputs = random_inputs(spec)
    inputs.x[1, 2, 3, 4] = poison
    ours, theirs = agreement.asked_of_bngrad(client, spec, inputs), agreement.asked_of(peer, spec, inputs)
    for our, their in zip(ours, theirs, strict=False):
        np.testing.assert_array_equal(np.isfinite(our), np.isfinite(their))
        finite = np.isfinite(our)
        np.testing.assert_allclose(our[finite], their[finite], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("peer", ["pytorch", "tensorflow"])
def test_denormals_are_kept_where_the_oracle_keeps_or_flushes_them(client: bngrad.Client, peer: str) -> None:
    spec = Spec(FLOAT32, (4, 5, 6, 7), 3, is_training=False)
    inputs = random_inputs(spec)
    inputs = inputs._replace(y_backprop=(inputs.y_backprop * np.float32(1e-40)))
    ours = agreement.asked_of_bngrad(client, spec, inputs)
    assert np.count_nonzero(ours[0]) > 0.9 * ours[0].size
    agreement.assert_no_less_exact(spec, inputs, ours, agreement.asked_of(peer, spec, inputs))
