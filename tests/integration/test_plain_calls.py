"""Calls of ``local:`` with plain NumPy arrays take a shorter way, on which nothing else may differ."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.problems import Case, assert_same_bits, random_inputs

import bngrad
from bngrad._local.kernels import LocalKernels
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32

CASES = [Case("v3", "NHWC", (4, 5, 6, 7)), Case("v2", "NCHW", (8, 24, 33, 33)), Case("onednn", "NXC", (4, 7))]
TENSORS = ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2", "reserve_space_3")
LARGE = [
    st.sampled_from([(2, 3, 3, 4), (1, 1, 1, 4), (2, 3, 4), (2, 2, 3, 3, 4), (0, 3, 3, 4)]),
    st.sampled_from([FLOAT32, FLOAT32, BFLOAT16, FLOAT16, np.dtype(np.float64), np.dtype(">f4")]),
]
ATTRIBUTES: dict[str, list[Any]] = {
    "epsilon": [0.001, 0, True, -1.0, float("nan"), 1e39, "1", [1.0]],
    "data_format": ["NHWC", "NCHW", "NDHWC", "nhwc", None, 3],
    "is_training": [True, False, 1, 0, 1.0, np.True_, "yes", []],
    "reserve_space_2_kind": ["variance", "inverse_std", "other", 1, {}],
    "priority": [0, 3, -8, 9, True, 0.0, 1.5, "1"],
}


@pytest.fixture(scope="module")
def local() -> Iterator[bngrad.Client]:
    with bngrad.Client("local:") as client:
        yield client


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_arrays_take_the_shorter_way(local: bngrad.Client, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(case.spec())
    expected = case.run(local, inputs, timeout=60)
    monkeypatch.setattr(LocalKernels, "run", lambda *_: pytest.fail("the longer way was taken"))
    assert_same_bits(case.run(local, inputs), expected)


def outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The arrays that a call returns, or its error."""
    try:
        result = call(**arguments)
    except Exception as error:
        return type(error), str(error)
    return type(result), [(array.dtype, array.shape, array.tobytes()) for array in result]


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of FusedBatchNormGradV3, of which some are wrong."""
    shape, dtype = draw(st.tuples(*LARGE))
    shapes = [shape] * 2 + [(4,)] * 3 + [draw(st.sampled_from([(0,), (4,)]))]
    dtypes = [dtype] * 2 + [FLOAT32] * 4
    rng = np.random.default_rng(0)
    arguments: dict[str, Any] = {
        name: rng.uniform(0.5, 2, shape).astype(dtype)
        for name, shape, dtype in zip(TENSORS, shapes, dtypes, strict=True)
    }
    for name in draw(st.sets(st.sampled_from(TENSORS), max_size=1)):
        changed = [None, 1.0, arguments[name][..., :1], arguments[name].astype(FLOAT16), arguments[name].T]
        arguments[name] = draw(st.sampled_from(changed))
    for name in draw(st.sets(st.sampled_from(sorted(ATTRIBUTES)), max_size=2)):
        arguments[name] = draw(st.sampled_from(ATTRIBUTES[name]))
    return arguments


@given(arguments=calls())
def test_both_ways_have_the_same_bits_and_errors(local: bngrad.Client, arguments: dict[str, Any]) -> None:
    call = local.fused_batch_norm_grad_v3
    # With a timeout of its own, a call takes the longer way.
    assert outcome(call, arguments) == outcome(call, {**arguments, "timeout": 60})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("is_training", True, 1), ("epsilon", 1.0, True), ("priority", 1, True), ("priority", 0, 0.0)],
)
def test_an_equal_value_of_a_wrong_type_is_refused(local: bngrad.Client, name: str, good: Any, bad: Any) -> None:
    inputs, call = random_inputs(CASES[1].spec()), partial(local.fused_batch_norm_grad_v2, data_format="NCHW")
    call(*inputs, **{name: good})
    with pytest.raises(TypeError, match=name):
        call(*inputs, **{name: bad})


class Identity:
    """A wrong epsilon, which has a hash."""


def test_a_refused_call_keeps_nothing(local: bngrad.Client) -> None:
    wrong: Any = Identity()
    kept = weakref.ref(wrong)
    with pytest.raises(TypeError, match="epsilon"):
        local.fused_batch_norm_grad_v2(*random_inputs(CASES[1].spec()), wrong)
    del wrong
    gc.collect()
    assert kept() is None


def test_a_call_during_which_the_client_is_closed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(CASES[1].spec())
    client = bngrad.Client("local:")
    client.fused_batch_norm_grad_v2(*inputs, data_format="NCHW")
    compute = LocalKernels.compute_plain

    def close_before(*arguments: Any) -> Any:
        client.close()
        return compute(*arguments)

    monkeypatch.setattr(LocalKernels, "compute_plain", close_before)
    kept = client.empty((2**24,))  # so that the output needs memory of its own
    with pytest.raises(bngrad.ClientClosedError, match="was closed during the call"):
        client.fused_batch_norm_grad_v2(*inputs, data_format="NCHW")
    del kept
