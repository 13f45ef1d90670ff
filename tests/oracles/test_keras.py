"""Batch normalisation layers of Keras on TensorFlow, whose gradients a client computes: `bngrad.keras`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests.oracles.conftest import CountedClient

import bngrad
import bngrad.keras

needs_renorm = pytest.mark.skipif(
    "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters, reason="this Keras has no renorm"
)


GEOMETRIES = {
    "dense": ((6, 5), -1),
    "sequence": ((3, 7, 5), -1),
    "sequence, channels second": ((3, 5, 7), 1),
    "NHWC": ((2, 4, 3, 5), -1),
    "NCHW": ((2, 5, 4, 3), 1),
    "NDHWC": ((2, 2, 4, 3, 5), -1),
    "NCDHW": ((2, 5, 2, 4, 3), 1),
}


def gradients(layer: Any, x: Any, **arguments: Any) -> list[Any]:
    """Returns the output, its gradients, and gradients of those, by x and the layer's weights."""
    x = tf.constant(x)
    with tf.GradientTape() as second:
        second.watch(x)
        with tf.GradientTape() as first:
            first.watch(x)
            y = layer(x, training=True, **arguments)
            loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32)))
        found = first.gradient(loss, [x, *layer.trainable_variables])
        penalty = tf.reduce_sum(tf.cast(found[0], tf.float32) ** 2)
    return [y, *found, *second.gradient(penalty, [x, *layer.trainable_variables[:1]])]


def assert_close(ours: list[Any], theirs: list[Any]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
        largest = np.abs(np.asarray(their)).max(initial=1e-3)
        np.testing.assert_allclose(np.asarray(our), np.asarray(their), atol=1e-4 * largest)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_both_orders_agree_with_keras_for_every_place_of_the_channels(counted: CountedClient, geometry: str) -> None:
    shape, axis = GEOMETRIES[geometry]
    x = np.random.default_rng(1).normal(1, 2, shape).astype(np.float32)
    gamma = keras.initializers.RandomUniform(0.5, 1.5, seed=0)
    arguments = {"axis": axis, "epsilon": 0.01, "gamma_initializer": gamma}
    ours = gradients(bngrad.keras.BatchNormalization(client=counted, **arguments), x)
    assert_close(ours, gradients(keras.layers.BatchNormalization(**arguments), x))
    assert len(counted.sizes) == 3, "the first order, and both orders in the gradient of the penalty"


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "float16", "bfloat16"])
@pytest.mark.parametrize("geometry", ["dense", "NCHW", "NDHWC"])
def test_outputs_and_moving_statistics_have_the_bits_of_keras(client: bngrad.Client, geometry: str, dtype: str) -> None:
    shape, axis = GEOMETRIES[geometry]
    arguments = {"axis": axis, "momentum": 0.75, "dtype": dtype}
    layers = bngrad.keras.BatchNormalization(client=client, **arguments), keras.layers.BatchNormalization(**arguments)
    x = np.random.default_rng(1).normal(1, 2, shape)
    ours, theirs = ([layer(x, training=True), layer(x + 1, training=True), *layer.weights] for layer in layers)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        np.testing.assert_array_equal(np.asarray(our, "float32"), np.asarray(their, "float32"))


def test_an_input_of_another_dtype_than_the_layers_has_a_gradient_of_its_own(client: bngrad.Client) -> None:
    x = np.random.default_rng(1).normal(1, 2, (6, 5)).astype(np.float16)
    layers = (
        bngrad.keras.BatchNormalization(client=client, autocast=False),
        keras.layers.BatchNormalization(autocast=False),
    )
    ours, theirs = (gradients(layer, x)[:2] for layer in layers)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        np.testing.assert_allclose(our, their, atol=2e-3 * np.abs(their).max())


RUNS = pytest.mark.parametrize("run", [lambda function: function, tf.function], ids=["eager", "graph"])


def layer_pair(client: Any) -> tuple[Any, Any]:
    """Returns a layer of ours and one of Keras, built for three channels."""
    layers = bngrad.keras.BatchNormalization(client=client), keras.layers.BatchNormalization()
    for layer in layers:
        layer.build((None, 3))
    return layers


@RUNS
def test_gradients_of_a_vectorized_map_are_right(client: bngrad.Client, run: Callable[[Any], Any]) -> None:
    # as in keras.layers.TimeDistributed for a time of unknown length
    x = tf.constant(np.random.default_rng(1).normal(size=(4, 6, 3)).astype(np.float32))

    def found(layer: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.vectorized_map(lambda each: layer(each, training=True), x) ** 3)
        return tape.gradient(loss, [x, *layer.trainable_variables])

    assert_close(*(run(lambda layer=layer: found(layer))() for layer in layer_pair(client)))


@RUNS
def test_forward_derivatives_are_right(client: bngrad.Client, run: Callable[[Any], Any]) -> None:
    x = tf.constant(np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32))

    def found(layer: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.sin(x)) as accumulator:
            y = layer(x, training=True)
        return [accumulator.jvp(y)]

    assert_close(*(run(lambda layer=layer: found(layer))() for layer in layer_pair(client)))


@pytest.mark.parametrize("is_forward", [False, True], ids=["two tapes", "reverse over forward"])
def test_the_second_order_is_exact(client: bngrad.Client, is_forward: bool) -> None:
    """Keras' own is not, so the reference is the difference of its gradients in float64."""
    rng = np.random.default_rng(5)
    x, weights, direction = rng.normal(size=(3, 4, 3, 3, 2))

    def loss(layer: Any, x: Any) -> Any:
        return tf.reduce_sum(tf.tanh(layer(x**3, training=True)) * tf.cast(weights, x.dtype))

    def gradient(layer: Any, x: Any) -> Any:
        x = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = loss(layer, x)
        return tape.gradient(found, x)

    stock, ours = keras.layers.BatchNormalization(dtype="float64"), bngrad.keras.BatchNormalization(client=client)
    step = 1e-5 * direction
    expected = (gradient(stock, x + step) - gradient(stock, x - step)) / 2e-5
    variable, along = tf.Variable(x, dtype=tf.float32), tf.constant(direction, tf.float32)
    with tf.GradientTape() as tape:
        if is_forward:
            with tf.autodiff.ForwardAccumulator(variable, along) as accumulator:
                found = loss(ours, variable)
            product = accumulator.jvp(found)
        else:
            with tf.GradientTape() as inner:
                found = loss(ours, variable)
            product = tf.reduce_sum(inner.gradient(found, variable) * along)
    difference = np.abs(tape.gradient(product, variable).numpy() - expected).max()
    assert difference < 1e-5 * np.abs(expected).max()


@RUNS
@pytest.mark.parametrize("is_forward", [False, True], ids=["three tapes", "forward over reverse"])
def test_the_third_order_is_an_error_rather_than_wrong(
    client: bngrad.Client, run: Callable[[Any], Any], is_forward: bool
) -> None:
    layer, _ = layer_pair(client)
    x = tf.constant(np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32))

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 3)
        return tape.gradient(loss, x)

    def penalty(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(gradient(x) ** 2)
        return tape.gradient(loss, x)

    def third() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(penalty(x) ** 2)
        return tape.gradient(loss, x)

    def forward() -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.sin(x)) as accumulator:
            found = gradient(x)
        return accumulator.jvp(found)

    with pytest.raises(NotImplementedError, match="no gradients of the third order"):
        run(forward if is_forward else third)()


def test_a_layer_without_scale_and_center_takes_tensors_of_unknown_shape(client: bngrad.Client) -> None:
    layer = bngrad.keras.BatchNormalization(scale=False, center=False, client=client)
    layer.build((None, None, None, 3))

    @tf.function(input_signature=[tf.TensorSpec([None] * 4)])  # type: ignore[untyped-decorator]
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 3)
        return tape.gradient(loss, x)

    assert gradient(tf.random.normal((2, 4, 4, 3))).shape == (2, 4, 4, 3)


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        pytest.param({"renorm": True}, {}, id="renorm", marks=needs_renorm),
        pytest.param({"synchronized": True}, {}, id="synchronized"),
        pytest.param({}, {"mask": np.array([[True, False, True]] * 2)}, id="mask"),
        pytest.param({"dtype": "float64"}, {}, id="float64"),
        pytest.param({"axis": 2}, {}, id="channels in the middle"),
    ],
)
def test_what_the_client_does_not_compute_is_keras_own(counted: CountedClient, changes: Any, call: Any) -> None:
    x = np.random.default_rng(1).normal(size=(2, 3, 4) if call else (2, 3, 4, 5)).astype(np.float64)
    layers = bngrad.keras.BatchNormalization(client=counted, **changes), keras.layers.BatchNormalization(**changes)
    ours, theirs = (gradients(layer, x, **call)[:2] for layer in layers)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(our, their)
    assert len(counted.sizes) == 0


def test_inference_and_frozen_layers_are_keras_own(counted: CountedClient) -> None:
    layer = bngrad.keras.BatchNormalization(client=counted)
    x = tf.ones((2, 3, 3, 4))
    layer(x, training=False)
    layer.trainable = False
    layer(x, training=True)
    assert len(counted.sizes) == 0


def test_a_layer_takes_no_target_for_a_client() -> None:
    target: Any = "localhost:50051"
    with pytest.raises(TypeError, match=r"client must be a bngrad.Client, not 'localhost:50051'"):
        bngrad.keras.BatchNormalization(client=target)


@RUNS
def test_a_closed_client_is_an_error_that_says_so(run: Callable[[Any], Any]) -> None:
    closed = bngrad.Client("localhost:1")
    closed.close()
    layer = bngrad.keras.BatchNormalization(client=closed)
    with pytest.raises((bngrad.ClientClosedError, tf.errors.UnknownError), match="is closed"):
        run(lambda: gradients(layer, np.ones((2, 3, 3, 4), np.float32)))()
