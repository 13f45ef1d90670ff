"""TensorFlow's ops by name: their signatures, their outputs, and what they refuse."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tests.integration.problems import random_inputs
from tests.oracles.agreement import assert_agreement

import bngrad
from bngrad.typing import DataFormat4D
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec

TENSOR, STATS = np.ones((2, 3, 3, 4), np.float32), np.ones(4, np.float32)
V3 = {"y_backprop": TENSOR, "x": TENSOR, "scale": STATS, "reserve_space_1": STATS, "reserve_space_2": STATS,
      "reserve_space_3": STATS}  # fmt: skip
V2 = {name: array for name, array in V3.items() if name != "reserve_space_3"}

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"x": TENSOR[:1]}, "x and y_backprop must have same shape, but x has shape"),
    ({"y_backprop": TENSOR[..., :3]}, "x and y_backprop must have same shape, but x has shape"),
    ({"scale": STATS[:3]}, "scale must have the same number of elements as the channels of x, got 3 and 4"),
    ({"scale": STATS[:1]}, "scale must have the same number of elements as the channels of x, got 1 and 4"),
    ({"reserve_space_1": STATS[:3]}, "reserve_space_1 must have the same number of elements as the channels of x"),
    ({"reserve_space_2": STATS[:3]}, "reserve_space_2 must have the same number of elements as the channels of x"),
    ({"scale": TENSOR}, "scale must be 1-dimensional"),
    ({"reserve_space_1": TENSOR}, "must be 1-dimensional"),
    ({"reserve_space_2": TENSOR}, "must be 1-dimensional"),
    ({"x": TENSOR[0], "y_backprop": TENSOR[0]}, "must be 4-dimensional"),
    ({"x": TENSOR[None], "y_backprop": TENSOR[None]}, "must be 4-dimensional"),
    ({"x": TENSOR.astype(np.float16)}, ""),
    ({"x": TENSOR.astype(np.float64), "y_backprop": TENSOR.astype(np.float64)}, ""),
    ({"x": TENSOR.astype(np.int32), "y_backprop": TENSOR.astype(np.int32)}, ""),
    ({"scale": STATS.astype(np.float16)}, ""),
    ({"data_format": "nhwc"}, "data_format"),
]
"""A change to a call that TensorFlow takes, and the words that both say; empty where only the refusal is common."""


@pytest.mark.parametrize(("changes", "words"), REFUSALS, ids=str)
@pytest.mark.parametrize("version", [2, 3])
def test_what_tensorflow_refuses_is_refused_in_its_words(
    client: bngrad.Client, version: int, changes: dict[str, Any], words: str
) -> None:
    arguments = {**(V3 if version == 3 else V2), **changes}
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)) as theirs:
        raw_op(version)(**{name: as_tensor(value) for name, value in arguments.items()})
    with pytest.raises(bngrad.InvalidArgumentError) as ours:
        client_op(client, version)(**arguments)
    assert words in str(theirs.value)
    assert words in str(ours.value)


@pytest.mark.parametrize("version", [2, 3])
def test_an_epsilon_that_is_no_number_is_a_type_error(client: bngrad.Client, version: int) -> None:
    arguments = V3 if version == 3 else V2
    with pytest.raises(TypeError):
        raw_op(version)(**{name: as_tensor(value) for name, value in arguments.items()}, epsilon="a")
    with pytest.raises(TypeError):
        client_op(client, version)(**arguments, epsilon="a")


@pytest.mark.parametrize("version", [2, 3])
def test_arguments_have_tensorflows_names_order_and_defaults(client: bngrad.Client, version: int) -> None:
    def parameters(function: Any) -> list[tuple[str, Any]]:
        own = {"name", "out", "timeout", "priority", "reserve_space_2_kind"}
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.name not in own]

    assert parameters(client_op(client, version)) == parameters(raw_op(version))


@pytest.mark.parametrize("version", [2, 3])
def test_outputs_have_tensorflows_names_dtypes_and_shapes(client: bngrad.Client, version: int) -> None:
    arguments = V3 if version == 3 else V2
    theirs = raw_op(version)(**{name: as_tensor(value) for name, value in arguments.items()})
    ours = client_op(client, version)(**arguments)
    assert ours._fields == theirs._fields
    # TensorFlow's last two outputs have different shapes in different kernels.
    for our, their in list(zip(ours, theirs, strict=True))[:3]:
        assert (our.shape, our.dtype) == (tuple(their.shape), their.dtype.as_numpy_dtype)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_v2_gives_the_numbers_of_tensorflows_v2(client: bngrad.Client, data_format: DataFormat4D, dtype: Any) -> None:
    spec = Spec(dtype, (4, 5, 6, 7), 3 if data_format == "NHWC" else 1)
    inputs = random_inputs(spec)
    theirs = raw_op(2)(
        **dict(zip(V2, map(as_tensor, inputs), strict=True)), epsilon=spec.epsilon, data_format=data_format
    )
    ours = client.fused_batch_norm_grad_v2(*inputs, epsilon=spec.epsilon, data_format=data_format)
    assert_agreement(spec, inputs, ours[:3], tuple(output.numpy() for output in theirs[:3]))


@pytest.mark.parametrize("shape", [(0, 3, 3, 4), (2, 0, 3, 4)], ids=str)
def test_empty_tensors_give_what_tensorflow_gives(client: bngrad.Client, shape: tuple[int, ...]) -> None:
    arguments = {**V2, "x": np.ones(shape, np.float32), "y_backprop": np.ones(shape, np.float32)}
    theirs = raw_op(2)(**{name: as_tensor(value) for name, value in arguments.items()})
    ours = client_op(client, 2)(**arguments)
    for our, their in list(zip(ours, theirs, strict=True))[:3]:
        np.testing.assert_array_equal(our, their.numpy())


def raw_op(version: int) -> Any:
    return tf.raw_ops.FusedBatchNormGradV3 if version == 3 else tf.raw_ops.FusedBatchNormGradV2


def client_op(client: bngrad.Client, version: int) -> Any:
    return client.fused_batch_norm_grad_v3 if version == 3 else client.fused_batch_norm_grad_v2


def as_tensor(value: Any) -> Any:
    return tf.constant(value) if isinstance(value, np.ndarray) else value
