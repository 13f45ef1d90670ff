"""Models of Keras on TensorFlow, whose batch normalisations are converted: `bngrad.keras`."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import pytest
from tests.oracles.conftest import CountedClient

import bngrad
import bngrad.keras


@pytest.fixture(params=["float32", "mixed_float16", "float16", "bfloat16"])
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    keras.mixed_precision.set_global_policy(before)


def network() -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((16, 16, 3))]
    for filters in (8, 16):
        layers += [keras.layers.Conv2D(filters, 3, use_bias=False), keras.layers.BatchNormalization()]
        layers += [keras.layers.ReLU(), keras.layers.MaxPooling2D()]
    inner = keras.Sequential([keras.layers.Dense(16), keras.layers.BatchNormalization(scale=False)])
    return keras.Sequential([*layers, keras.layers.Flatten(), inner, keras.layers.Dense(10)])


def losses(model: Any, seed: int | None = None) -> list[float]:
    """Trains a model for two epochs, and returns the loss of each; a seed changes the images by 1e-7 of themselves."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(96, 16, 16, 3)).astype(np.float32), rng.integers(0, 10, 96)
    if seed is not None:
        x *= (1 + 1e-7 * np.random.default_rng(seed).normal(size=x.shape)).astype(np.float32)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fitted = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    found: list[float] = fitted.history["loss"]
    return found


def test_a_converted_model_trains_as_keras_own(counted: CountedClient, policy: str) -> None:
    stock, converted = network(), bngrad.keras.convert(network(), counted)
    expected = losses(stock)

    def difference(found: list[float]) -> float:
        return float(np.abs(np.subtract(found, expected)).max())

    ours = difference(losses(converted))
    if ours > 1e-3:  # about one step of a loss in 16 bits, where Keras' own may be further off
        assert policy in {"float16", "bfloat16"}
        assert any(ours <= difference(losses(network(), seed)) for seed in range(5))
    assert len(counted.sizes) == 2 * 3 * 3, "epochs, batches, layers"
    for ours, theirs in zip(converted.get_weights(), stock.get_weights(), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    stock.set_weights(converted.get_weights())
    x = np.ones((2, 16, 16, 3), np.float32)
    np.testing.assert_allclose(converted.predict(x, verbose=0), stock.predict(x, verbose=0), rtol=1e-3, atol=1e-3)
    assert not converted.jit_compile


def test_a_compiled_model_is_converted_and_reverted_in_place(counted: CountedClient, target: str) -> None:
    model, x, y = network(), np.ones((4, 16, 16, 3), np.float32), np.zeros(4)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
    model.fit(x, y, verbose=0)
    layers, weights = list(model._flatten_layers()), model.get_weights()
    assert bngrad.keras.convert(model, counted) is model
    assert all(before is after for before, after in zip(layers, model._flatten_layers(), strict=True))
    for ours, theirs in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.fit(x, y, verbose=0)
    assert len(counted.sizes) == 3
    with CountedClient(target) as other:
        bngrad.keras.convert(model, other)
        model.fit(x, y, verbose=0)
        assert (len(counted.sizes), len(other.sizes)) == (3, 3)
    assert bngrad.keras.revert(model) is model
    model.fit(x, y, verbose=0)
    assert (len(counted.sizes), len(other.sizes)) == (3, 3)
    assert all(type(each) is not bngrad.keras.BatchNormalization and each.supports_jit for each in layers)
    assert not any(getattr(each, "client", None) for each in layers)


def test_a_model_without_such_layers_is_returned_with_a_warning(client: bngrad.Client) -> None:
    with pytest.warns(UserWarning, match="convert changed nothing: .* a model must be built before"):
        bngrad.keras.convert(keras.Sequential([keras.layers.Dense(3)]), client)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # of Keras itself
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, keras.models.clone_model, lambda model: pickle.loads(pickle.dumps(model))],  # noqa: S301
)
def test_copies_have_no_client(client: bngrad.Client, copied: Callable[[Any], Any]) -> None:
    model = copied(bngrad.keras.convert(network(), client))
    found = [each.client for each in model._flatten_layers() if isinstance(each, bngrad.keras.BatchNormalization)]
    assert found == [None] * 3


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # of Keras itself
def test_a_saved_model_has_no_client(counted: CountedClient, tmp_path: Path) -> None:
    model = bngrad.keras.convert(network(), counted)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    ours = [each for each in loaded._flatten_layers() if isinstance(each, bngrad.keras.BatchNormalization)]
    assert [each.client for each in ours] == [None] * 3
    x = np.ones((2, 16, 16, 3), np.float32)
    np.testing.assert_allclose(loaded(x, training=True), model(x, training=True), atol=1e-5)


@pytest.mark.parametrize("client", ["localhost:50051", None])
def test_a_client_must_be_one(client: Any) -> None:
    with pytest.raises(TypeError, match=rf"client must be a bngrad.Client, not {client!r}"):
        bngrad.keras.convert(network(), client)


@pytest.mark.parametrize("model", [None, [keras.layers.BatchNormalization()]])
def test_a_model_must_be_one(model: Any) -> None:
    with bngrad.Client("127.0.0.1:1") as client:
        for change in (partial(bngrad.keras.convert, client=client), bngrad.keras.revert):
            with pytest.raises(TypeError, match=r"model must be a keras.layers.Layer, such as a keras.Model, not "):
                change(model)
