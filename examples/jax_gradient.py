"""Lets a server compute the gradient of batch norm in JAX, also in functions that are compiled.

python examples/jax_gradient.py localhost:50051
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bngrad

EPSILON = 1e-3


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def batch_norm(x: Any, scale: Any, offset: Any, client: bngrad.Client) -> Any:
    """Normalises the last dimension of ``x`` as in training; its gradient is a call of the client."""
    return _forward(x, scale, offset, client)[0]


def _forward(x: Any, scale: Any, offset: Any, client: bngrad.Client) -> Any:
    axes = tuple(range(x.ndim - 1))
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean(axes), wide.var(axes)
    y = (wide - mean) * jax.lax.rsqrt(variance + EPSILON) * scale + offset
    return y.astype(x.dtype), (x, scale, mean, variance)


def _backward(client: bngrad.Client, saved: Any, y_backprop: Any) -> Any:
    def call(y_backprop: Any, x: Any, scale: Any, mean: Any, variance: Any) -> tuple[Any, ...]:
        return client.fused_batch_norm_grad_v3(y_backprop, x, scale, mean, variance, None, epsilon=EPSILON)[:3]

    x, scale, _, _ = saved
    like = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (x, scale, scale))
    return jax.pure_callback(call, like, y_backprop, *saved)


batch_norm.defvjp(_forward, _backward)


def main(target: str) -> None:
    x, weights = np.random.default_rng(0).standard_normal((2, 32, 28, 28, 64), np.float32)
    arguments = x, np.ones(64, np.float32), np.zeros(64, np.float32)
    with bngrad.Client(target) as client:
        client.server_info()  # without a server, its error is clearer than that of a compiled function

        def loss(x: Any, scale: Any, offset: Any, by_client: bool) -> Any:
            y = batch_norm(x, scale, offset, client) if by_client else _forward(x, scale, offset, client)[0]
            return (y**2 * weights).sum()

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
