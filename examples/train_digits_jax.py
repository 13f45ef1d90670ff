"""Trains a network on scikit-learn's digits, with JAX alone and with bngrad, and compares the losses.

python examples/train_digits_jax.py localhost:50051
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import bngrad
import bngrad.jax

STEPS, BATCH, RATE = 60, 32, 0.1
Norm = Callable[[Any, Any, Any], Any]


def main(target: str) -> None:
    stock, ours = losses(target)
    difference = max(abs(a - b) for a, b in zip(stock, ours, strict=True))
    print(f"loss after {STEPS} steps: {stock[-1]:.4f} with JAX, {ours[-1]:.4f} with bngrad")
    print(f"the losses differ by {difference:.1e} at most")


def losses(target: str) -> tuple[list[float], list[float]]:
    """Returns the losses with JAX alone, and with bngrad."""
    with bngrad.Client(target) as client:
        client.server_info()  # without a server, its error is clearer than that of a compiled function
        ours = train(lambda *arguments: bngrad.jax.batch_norm(*arguments, client=client)[0])  # the one line
    return train(stock_norm), ours


def stock_norm(x: Any, scale: Any, offset: Any) -> Any:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + offset


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(random.normal(0, 1 / 3, (3, 3, 1, 32)), jnp.float32),
        "scale": jnp.ones(32),
        "offset": jnp.zeros(32),
        "dense": jnp.asarray(random.normal(0, 0.02, (8 * 8 * 32, 10)), jnp.float32),
    }


def loss(norm: Norm, weights: dict[str, Any], images: Any, labels: Any) -> Any:
    x = jax.lax.conv_general_dilated(
        images, weights["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jax.nn.relu(norm(x, weights["scale"], weights["offset"]))
    scores = jax.nn.log_softmax(x.reshape(len(x), -1) @ weights["dense"])
    return -jnp.take_along_axis(scores, labels[:, None], 1).mean()


def train(norm: Norm) -> list[float]:
    """Trains the network, and returns the loss of each step."""
    digits = load_digits()
    weights, found = parameters(), []
    step = jax.jit(jax.value_and_grad(partial(loss, norm)))
    for i in range(STEPS):
        chosen = np.arange(i * BATCH, (i + 1) * BATCH) % len(digits.target)
        images = jnp.asarray(digits.images[chosen, :, :, None] / 16, jnp.float32)
        value, gradients = step(weights, images, jnp.asarray(digits.target[chosen]))
        weights = jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients)
        found.append(float(value))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the server: HOST:PORT or unix:PATH")
    try:
        main(parser.parse_args().target)
    except bngrad.BngradError as error:
        sys.exit(f"{parser.prog}: {error}")
