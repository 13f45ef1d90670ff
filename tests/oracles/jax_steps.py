"""Trains by JAX for many compiled steps with a large tensor: `python -m tests.oracles.jax_steps [STEPS] [DEVICES]`.

Callbacks that compute by JAX, or read arrays of JAX, have hung at such sizes, for certain where as many run at a time
as there are CPUs; `bngrad.jax` must not. Each device computes a part of the batch.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import bngrad
import bngrad.jax
from bngrad_cli.embedded import EmbeddedServer

SHAPE = (32, 56, 56, 128)


def main(steps: int = 200, devices: int = 1) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    scale, offset = jnp.ones(SHAPE[-1]), jnp.zeros(SHAPE[-1])
    with EmbeddedServer() as server, bngrad.Client(server.target) as client:

        def loss(x: jax.Array) -> jax.Array:
            return jnp.sin(bngrad.jax.batch_norm(x, scale, offset, client=client)[0]).sum()

        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
        batch = jax.sharding.PartitionSpec("batch")
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, batch))
        gradient = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=batch, out_specs=batch, check_vma=False)
        step = jax.jit(lambda x: x - gradient(x))
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            x = jax.block_until_ready(step(x))
            times.append(1e3 * (time.perf_counter() - began))
    median, slowest = float(np.median(times)), max(times)
    print(f"{steps} steps with {x.nbytes / 1e6:.0f} MB: median {median:.0f} ms, slowest {slowest:.0f} ms")
    assert np.isfinite(x).all()


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    main(*given)
