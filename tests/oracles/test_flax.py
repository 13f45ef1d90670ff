"""Flax's batch normalisation, whose gradients a client computes: `bngrad.jax.nnx`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.oracles.conftest import CountedClient

import bngrad
import bngrad.jax.nnx

CHANNELS = 5
LAYERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "dense": ((6, CHANNELS), {"use_scale": False}),
    "sequence, channels second": ((4, CHANNELS, 3), {"axis": 1, "use_bias": False}),
    "sequence, channels last but one": ((4, CHANNELS, 3), {"axis": -2}),
    "images in bfloat16": ((4, 3, 6, CHANNELS), {"dtype": jnp.bfloat16}),
    "volumes": ((2, 3, 4, 3, CHANNELS), {"axis": 4, "momentum": 0.5, "epsilon": 0.1}),
    "parameters in bfloat16": ((6, CHANNELS), {"param_dtype": jnp.bfloat16}),
}


def trained(layer: Any, x: Any) -> list[Any]:
    """Returns the loss, the gradients and the running statistics of two steps."""
    weights = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    @nnx.jit  # type: ignore[untyped-decorator] # Flax is not followed by mypy
    def step(layer: Any, x: Any) -> Any:
        def loss(layer: Any, x: Any) -> Any:
            return (jnp.sin(layer(x).astype(jnp.float32)) * weights).sum()

        return nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)

    step(layer, x)
    found: list[Any] = jax.tree.leaves(step(layer, x))
    return [*found, layer.mean[...], layer.var[...]]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_as_flaxs_own(counted: CountedClient, name: str) -> None:
    shape, options = LAYERS[name]
    x = np.random.default_rng(0).normal(1, 2, shape).astype(np.float32)
    ours = trained(bngrad.jax.nnx.BatchNorm(CHANNELS, client=counted, rngs=nnx.Rngs(0), **options), x)
    theirs = trained(nnx.BatchNorm(CHANNELS, rngs=nnx.Rngs(0), **options), x)
    for our, their in zip(ours, theirs, strict=True):
        assert (our.shape, our.dtype) == (their.shape, their.dtype)
        assert abs(our - their).max() <= (0.05 if "bfloat16" in name else 1e-4)
    assert counted.sizes == [x.size] * 2


def test_a_layer_without_scale_and_bias_is_computed_in_float32_with_64_bits_enabled(client: bngrad.Client) -> None:
    x = np.random.default_rng(0).normal(size=(6, CHANNELS)).astype(np.float32)
    options = {"use_scale": False, "use_bias": False, "use_running_average": np.False_}
    layer = bngrad.jax.nnx.BatchNorm(CHANNELS, client=client, rngs=nnx.Rngs(0), **options)
    jax.config.update("jax_enable_x64", True)
    try:
        by_x = nnx.grad(lambda layer, x: (layer(x) ** 3).sum(), argnums=1)(layer, jnp.asarray(x))
    finally:
        jax.config.update("jax_enable_x64", False)
    assert by_x.dtype == jnp.float32


def test_what_the_client_does_not_compute_is_flaxs_own() -> None:
    with bngrad.Client("localhost:1") as client:
        layer = bngrad.jax.nnx.BatchNorm(CHANNELS, client=client, rngs=nnx.Rngs(0))
    stock = nnx.BatchNorm(CHANNELS, rngs=nnx.Rngs(0))
    x, mask = np.random.default_rng(0).normal(size=(6, CHANNELS)).astype(np.float32), np.ones((6, 1), bool)

    def gradients(layer: Any) -> list[Any]:
        calls = {"use_running_average": True}, {"mask": mask}
        return [nnx.grad(lambda m, x, call=call: jnp.sin(m(x, **call)).sum(), argnums=1)(layer, x) for call in calls]

    for our, their in zip(gradients(layer), gradients(stock), strict=True):
        np.testing.assert_array_equal(our, their)
    assert nnx.clone(layer).client is client


def test_statistics_over_a_named_axis_are_flaxs_own(client: bngrad.Client) -> None:
    x = np.random.default_rng(0).normal(size=(2, 6, CHANNELS)).astype(np.float32)
    options = {"axis_name": "parts", "rngs": nnx.Rngs(0)}
    layers = bngrad.jax.nnx.BatchNorm(CHANNELS, client=client, **options), nnx.BatchNorm(CHANNELS, **options)
    over_parts = nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0), axis_name="parts")
    np.testing.assert_array_equal(*(over_parts(layer, x) for layer in layers))


def test_copies_share_the_client_and_pickles_leave_it_out() -> None:
    with bngrad.Client("localhost:1") as client:
        layer = bngrad.jax.nnx.BatchNorm(CHANNELS, client=client, rngs=nnx.Rngs(0))
        model = nnx.Sequential(nnx.Linear(3, CHANNELS, rngs=nnx.Rngs(0)), layer)
        for copied in (copy.deepcopy(model), nnx.clone(model)):
            assert copied.layers[1].client is client
            assert copied.layers[1].mean is not layer.mean
        assert nnx.graphdef(copy.deepcopy(model)) == nnx.graphdef(model)
        assert pickle.loads(pickle.dumps(layer)).client is None  # noqa: S301
        layer.client = None
        assert (layer.client, nnx.clone(layer).client) == (None, None)


def test_a_layer_takes_no_target_for_a_client() -> None:
    target: Any = "localhost:50051"
    with pytest.raises(TypeError, match=r"client must be a bngrad.Client, not 'localhost:50051'"):
        bngrad.jax.nnx.BatchNorm(CHANNELS, client=target, rngs=nnx.Rngs(0))
