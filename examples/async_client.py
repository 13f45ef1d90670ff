"""Sends eight requests at once, from one thread.

python examples/async_client.py localhost:50051
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import numpy as np

import bngrad.aio


async def main(target: str) -> None:
    rng = np.random.default_rng(0)
    scale, mean, variance = np.ones(64, np.float32), np.zeros(64, np.float32), np.ones(64, np.float32)
    batches = rng.standard_normal((8, 2, 16, 28, 28, 64), np.float32)

    async with bngrad.aio.Client(target) as client:
        gradients = await asyncio.gather(
            *(client.fused_batch_norm_grad_v2(y_backprop, x, scale, mean, variance) for y_backprop, x in batches)
        )
    for number, (x_backprop, *_) in enumerate(gradients):
        print(f"batch {number}: x_backprop {x_backprop.shape}, largest {abs(x_backprop).max():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the server: HOST:PORT or unix:PATH")
    try:
        asyncio.run(main(parser.parse_args().target))
    except bngrad.BngradError as error:
        sys.exit(f"{parser.prog}: {error}")
