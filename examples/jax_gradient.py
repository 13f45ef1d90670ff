"""Lets a server compute the gradient of batch norm in JAX, also in functions that are compiled.

python examples/jax_gradient.py localhost:50051
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bngrad
import bngrad.jax

EPSILON = 1e-3


def batch_norm(x: Any, scale: Any, offset: Any) -> Any:
    """Normalises the last dimension as in training; JAX computes its gradient."""
    axes = tuple(range(x.ndim - 1))
    return (x - x.mean(axes)) * jax.lax.rsqrt(x.var(axes) + EPSILON) * scale + offset


def main(target: str) -> None:
    x, weights = np.random.default_rng(0).standard_normal((2, 32, 28, 28, 64), np.float32)
    arguments = x, np.ones(64, np.float32), np.zeros(64, np.float32)
    with bngrad.Client(target) as client:
        client.server_info()  # without a server, its error is clearer than that of a compiled function

        def loss(x: Any, scale: Any, offset: Any, by_client: bool) -> Any:
            if by_client:
                y, _, _ = bngrad.jax.batch_norm(x, scale, offset, client=client, epsilon=EPSILON)
            else:
                y = batch_norm(x, scale, offset)
            return jnp.sum(y**2 * weights)

        gradients = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
        ours, theirs = (jax.block_until_ready(gradients(*arguments, by_client)) for by_client in (True, False))
    for name, our, their in zip(("x", "scale", "offset"), ours, theirs, strict=True):
        difference = abs(our - their).max() / abs(their).max()
        print(f"gradient of {name}: {our.shape}, differs from JAX's by {difference:.1e} of the largest value")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the server: HOST:PORT or unix:PATH")
    try:
        main(parser.parse_args().target)
    except bngrad.BngradError as error:
        sys.exit(f"{parser.prog}: {error}")
