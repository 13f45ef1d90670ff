"""TensorFlow's own batch norm, whose gradients a client computes: `bngrad.tensorflow.install`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gen_nn_ops

import bngrad
import bngrad.tensorflow
from bngrad.typing import ReserveSpace2Kind

INPUTS = ("grad_y", "x", "scale")


@pytest.fixture(autouse=True)
def installed(client: bngrad.Client) -> Iterator[None]:
    bngrad.tensorflow.install(client)
    yield
    bngrad.tensorflow.uninstall()


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
def test_both_orders_are_tensorflows_own_but_for_rounding(is_training: bool) -> None:
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
    bngrad.tensorflow.uninstall()
    for our, their in zip(ours, gradients(), strict=True):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
        assert tf.reduce_max(abs(our - their)) <= 1e-4 * tf.reduce_max(abs(their))


@pytest.mark.parametrize("kind", ["variance", "inverse_std"])
def test_in_inference_the_variance_is_given_whatever_is_saved_in_training(
    client: bngrad.Client, kind: ReserveSpace2Kind
) -> None:
    x = tf.random.normal((4, 3, 3, 2))
    scale, mean, variance = tf.unstack(tf.random.uniform((3, 2), 0.5, 2))

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, mean, mean, variance, is_training=False)
            loss = tf.reduce_sum(y**3)
        return tape.gradient(loss, x)

    bngrad.tensorflow.install(client, reserve_space_2_kind=kind)
    ours = gradient()
    bngrad.tensorflow.uninstall()
    np.testing.assert_allclose(ours, gradient(), rtol=1e-4)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16], ids=str)
def test_gradients_of_every_dtype_come_from_the_client_in_both_modes(in_graph: bool, dtype: Any) -> None:
    rng = np.random.default_rng(3)
    x = tf.cast(rng.normal(1, 2, (4, 9, 9, 8)), dtype)
    weights = tf.cast(rng.normal(size=x.shape), dtype)
    scale, offset = map(tf.constant, rng.uniform(0.5, 2, (2, 8)).astype(np.float32))

    def gradients() -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([x, scale, offset])
            y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, offset)
            loss = tf.reduce_sum(tf.cast(y * weights, tf.float32))
        found: list[Any] = tape.gradient(loss, [x, scale, offset])
        return found

    ours = tf.function(gradients)() if in_graph else gradients()
    bngrad.tensorflow.uninstall()
    for our, their in zip(ours, gradients(), strict=True):
        assert our.dtype == their.dtype
        difference, largest = tf.reduce_max(abs(our - their)), tf.reduce_max(abs(their))
        assert difference <= {2: 0.02, 4: 1e-5}[our.dtype.size] * largest


def test_shapes_of_gradients_are_known_in_a_graph() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def gradients(x: Any, scale: Any) -> None:
        with tf.GradientTape() as second:
            second.watch([x, scale])
            with tf.GradientTape() as first:
                first.watch([x, scale])
                y, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, scale)
            found = first.gradient(y, [x, scale])
        for each in (found, second.gradient(found, [x, scale])):
            assert [gradient.shape for gradient in each] == [x.shape, scale.shape]

    gradients(tf.ones((2, 3, 3, 4)), tf.ones(4))


def test_a_target_is_refused_for_a_client() -> None:
    target: Any = "localhost:50051"
    with pytest.raises(TypeError, match=r"client must be a bngrad.Client, not 'localhost:50051'"):
        bngrad.tensorflow.install(target)


def test_a_kind_of_reserve_space_that_does_not_exist_is_refused_at_once(client: bngrad.Client) -> None:
    kind: Any = "std"
    with pytest.raises(ValueError, match="reserve_space_2_kind must be one of variance, inverse_std, not 'std'"):
        bngrad.tensorflow.install(client, reserve_space_2_kind=kind)


@pytest.mark.parametrize("in_graph", [False, True])
def test_what_the_client_refuses_is_tensorflows_invalid_argument(in_graph: bool) -> None:
    x = tf.ones((2, 3, 3, 4))

    def gradient() -> Any:
        return gen_nn_ops.fused_batch_norm_grad_v2(x, x, tf.ones(3), tf.ones(4), tf.ones(4))

    with pytest.raises(tf.errors.InvalidArgumentError, match="scale must have the same number of elements"):
        (tf.function(gradient) if in_graph else gradient)()
