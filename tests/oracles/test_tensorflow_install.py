"""TensorFlow's own batch norm differentiated twice, with a server in the place of its gradient ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from examples.tensorflow_gradient import install
from tensorflow.python.ops import gen_nn_ops

import bngrad

INPUTS = ("grad_y", "x", "scale")


@pytest.fixture(autouse=True)
def installed(client: bngrad.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (2, 3):
        name = f"fused_batch_norm_grad_v{version}"
        monkeypatch.setattr(gen_nn_ops, name, getattr(gen_nn_ops, name))  # puts it back after the test
    install(client)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    ("data_format", "shape", "in_graph"),
    [
        ("NHWC", (2, 3, 2, 2), False),
        ("NHWC", (2, 3, 2, 2), True),
        ("NCHW", (2, 3, 2, 2), False),
        ("NDHWC", (1, 2, 3, 2, 2), True),
    ],
)
def test_tensorflows_gradient_checker_agrees(
    data_format: str, shape: tuple[int, ...], is_training: bool, in_graph: bool
) -> None:
    """The symbolic gradients of the gradients, which the server computes, against differences of what it computes."""
    rng = np.random.default_rng(1)
    channels = shape[-1] if data_format.endswith("C") else shape[1]
    grad_y, x = rng.uniform(size=(2, *shape)).astype(np.float32)
    scale, offset, mean, variance = rng.uniform(0.5, 1, (4, channels)).astype(np.float32)
    reserves = (tf.zeros(0), tf.zeros(0)) if is_training else (mean, variance)

    def gradients(grad_y: Any, x: Any, scale: Any) -> list[Any]:
        shift = tf.constant(offset)
        with tf.GradientTape() as tape:
            tape.watch([x, scale, shift])
            y = tf.raw_ops.FusedBatchNormV3(
                x=x, scale=scale, offset=shift, mean=reserves[0], variance=reserves[1], epsilon=1e-2,
                data_format=data_format, is_training=is_training,
            ).y  # fmt: skip
        found: list[Any] = tape.gradient(y, [x, scale, shift], grad_y)
        return found

    run = tf.function(gradients) if in_graph else gradients
    for output in range(3):
        theirs, ours = tf.test.compute_gradient(lambda *args, i=output: run(*args)[i], [grad_y, x, scale], delta=1e-2)
        for name, symbolic, numeric in zip(INPUTS, theirs, ours, strict=True):
            np.testing.assert_allclose(symbolic, numeric, rtol=1e-2, atol=5e-3, err_msg=f"{name} of output {output}")


@pytest.mark.parametrize("is_training", [True, False])
def test_both_orders_are_tensorflows_own_but_for_rounding(is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    x = tf.constant(rng.normal(1, 2, (8, 9, 9, 16)).astype(np.float32))
    weights = tf.constant(rng.normal(size=x.shape).astype(np.float32))
    scale, offset, mean, variance = map(tf.constant, rng.uniform(0.5, 2, (4, 16)).astype(np.float32))

    def gradients() -> list[Any]:
        reserves = {} if is_training else {"mean": mean, "variance": variance}
        with tf.GradientTape() as second:
            with tf.GradientTape() as first:
                for tape in (first, second):
                    tape.watch([x, scale])
                y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, is_training=is_training, **reserves)
                loss = tf.reduce_sum(y * y * weights)
            by_x, by_scale = first.gradient(loss, [x, scale])
            penalty = tf.reduce_sum(by_x**2) + tf.reduce_sum(by_scale**2)
        return [by_x, by_scale, *second.gradient(penalty, [x, scale])]

    ours = gradients()
    monkeypatch.undo()
    for our, their in zip(ours, gradients(), strict=True):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
        assert tf.reduce_max(abs(our - their)) <= 1e-4 * tf.reduce_max(abs(their))
