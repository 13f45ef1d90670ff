"""The three first-order ops by the client, over TCP and a Unix socket, by every transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.integration.problems import Inputs, assert_gradients, assert_same_bits, random_inputs
from tests.servers import TRANSPORTS

import bngrad
import bngrad.aio
from bngrad.typing import DataFormat, DataFormat4D, OneDnnDataFormat
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, ReserveSpace2Kind, Spec

DTYPES = [FLOAT16, BFLOAT16, FLOAT32]
NOTHING = np.empty(0, np.float32)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("data_format", "shape", "axis"),
    [
        ("NHWC", (4, 5, 6, 7), 3),
        ("NCHW", (4, 7, 5, 6), 1),
        ("NDHWC", (2, 3, 5, 6, 7), 4),
        ("NCDHW", (2, 7, 3, 5, 6), 1),
        ("NHWC", (1, 1, 1, 1), 3),
        ("NHWC", (0, 5, 6, 7), 3),
        ("NCDHW", (2, 7, 0, 5, 6), 1),
        ("NHWC", (2, 5, 6, 0), 3),
    ],
)
def test_v3_gives_the_references_gradients(
    client: bngrad.Client,
    dtype: np.dtype[Any],
    data_format: DataFormat,
    shape: tuple[int, ...],
    axis: int,
    is_training: bool,
) -> None:
    spec = Spec(dtype, shape, axis, epsilon=0.01, is_training=is_training)
    inputs = random_inputs(spec)
    outputs = client.fused_batch_norm_grad_v3(
        *inputs, NOTHING, epsilon=0.01, data_format=data_format, is_training=is_training
    )
    assert_gradients(spec, inputs, outputs)
    for empty in (outputs.reserve_space_4, outputs.reserve_space_5):
        assert (empty.shape, empty.dtype) == ((0,), FLOAT32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("data_format", "shape", "axis"), [("NHWC", (4, 5, 6, 7), 3), ("NCHW", (4, 7, 5, 6), 1)])
def test_v2_gives_the_references_gradients(
    client: bngrad.Client, dtype: np.dtype[Any], data_format: DataFormat4D, shape: tuple[int, ...], axis: int
) -> None:
    spec = Spec(dtype, shape, axis)
    inputs = random_inputs(spec)
    outputs = client.fused_batch_norm_grad_v2(*inputs, data_format=data_format)
    assert_gradients(spec, inputs, outputs)
    for empty in (outputs.reserve_space_3, outputs.reserve_space_4):
        assert (empty.shape, empty.dtype) == ((0,), FLOAT32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data_format", ["NXC", "NCX"])
@pytest.mark.parametrize("spatial", [(), (6,), (5, 6), (2, 5, 6)])
def test_the_onednn_op_gives_the_references_gradients(
    client: bngrad.Client, dtype: np.dtype[Any], data_format: OneDnnDataFormat, spatial: tuple[int, ...]
) -> None:
    shape, axis = ((4, *spatial, 7), len(spatial) + 1) if data_format == "NXC" else ((4, 7, *spatial), 1)
    spec = Spec(dtype, shape, axis, epsilon=0.001)
    inputs = random_inputs(spec)
    y_backprop, x, gamma, mean, variance = inputs
    outputs = client.batch_norm_training_backprop(
        x, y_backprop, mean, variance, gamma, epsilon=0.001, data_format=data_format
    )
    assert_gradients(spec, inputs, outputs)
    assert outputs._fields == ("input_delta", "gamma_delta", "beta_delta")

    without_gamma = client.batch_norm_training_backprop(
        x, y_backprop, mean, variance, epsilon=0.001, data_format=data_format
    )
    assert_gradients(spec, inputs._replace(scale=np.ones_like(gamma)), without_gamma)


def test_the_onednn_op_takes_bfloat16_statistics(client: bngrad.Client) -> None:
    spec = Spec(BFLOAT16, (40, 9), 1, stats_dtype=BFLOAT16, epsilon=0.001)
    inputs = random_inputs(spec)
    y_backprop, x, gamma, mean, variance = inputs
    outputs = client.batch_norm_training_backprop(x, y_backprop, mean, variance, gamma, epsilon=0.001)
    assert_gradients(spec, inputs, outputs)


@pytest.mark.parametrize("is_training", [True, False])
def test_reserve_space_2_may_be_the_inverse_standard_deviation(client: bngrad.Client, is_training: bool) -> None:
    spec = Spec(FLOAT32, (4, 5, 6, 7), 3, is_training=is_training, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD)
    inputs = random_inputs(spec)
    outputs = client.fused_batch_norm_grad_v3(
        *inputs, NOTHING, is_training=is_training, reserve_space_2_kind="inverse_std"
    )
    assert_gradients(spec, inputs, outputs)


def test_the_onednn_op_takes_the_inverse_standard_deviation_too(client: bngrad.Client) -> None:
    spec = Spec(FLOAT32, (40, 9), 1, reserve_space_2_kind=ReserveSpace2Kind.INVERSE_STD)
    inputs = random_inputs(spec)
    y_backprop, x, gamma, mean, inverse_std = inputs
    outputs = client.batch_norm_training_backprop(
        x, y_backprop, mean, inverse_std, gamma, epsilon=1, variance_kind="inverse_std"
    )
    assert_gradients(spec, inputs, outputs)


def test_a_tensor_of_a_real_networks_size_comes_back_right(server: EmbeddedServer) -> None:
    spec = Spec(FLOAT32, (32, 56, 56, 64), 3)
    inputs = random_inputs(spec)
    for transport in TRANSPORTS:
        with bngrad.Client(server.target, transport=transport) as client:
            outputs = client.fused_batch_norm_grad_v3(*inputs, NOTHING)
        if transport == "auto":
            assert_gradients(spec, inputs, expected := outputs)
        assert_same_bits(outputs, expected)


@pytest.mark.parametrize(
    "change",
    [
        np.asfortranarray,
        lambda array: array.astype(array.dtype.newbyteorder(">")),
        lambda array: np.repeat(array, 2, axis=0)[::2],
        lambda array: array[..., ::-1].copy()[..., ::-1],
    ],
    ids=["fortran", "big-endian", "strided", "negative-strides"],
)
def test_any_memory_layout_of_the_callers_arrays_gives_the_same_bits(client: bngrad.Client, change: Any) -> None:
    spec = Spec(FLOAT32, (4, 5, 6, 7), 3)
    inputs = random_inputs(spec)
    expected = client.fused_batch_norm_grad_v3(*inputs, NOTHING)
    changed = Inputs(*map(change, inputs))
    for ours, theirs in zip(client.fused_batch_norm_grad_v3(*changed, NOTHING), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


async def test_the_asynchronous_client_gives_the_same_bits(target: str, client: bngrad.Client) -> None:
    spec = Spec(FLOAT32, (4, 5, 6, 7), 3)
    inputs = random_inputs(spec)
    expected = client.fused_batch_norm_grad_v2(*inputs)
    y_backprop, x, gamma, mean, variance = inputs
    async with bngrad.aio.Client(target) as asynchronous:
        v2 = await asynchronous.fused_batch_norm_grad_v2(*inputs)
        v3 = await asynchronous.fused_batch_norm_grad_v3(*inputs, NOTHING)
        onednn = await asynchronous.batch_norm_training_backprop(x, y_backprop, mean, variance, gamma, epsilon=1e-4)
    for outputs in (v2, v3, onednn):
        for ours, theirs in zip(outputs[:3], expected[:3], strict=True):
            np.testing.assert_array_equal(ours, theirs)
