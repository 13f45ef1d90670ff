"""Calls the three first-order ops once each.

python examples/quickstart.py                  starts its own server (needs bngrad[server])
python examples/quickstart.py localhost:50051  uses the server there
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import bngrad
from bngrad_cli.embedded import EmbeddedServer, ServerStartError


def main(target: str) -> None:
    rng = np.random.default_rng(0)
    x, y_backprop = (rng.standard_normal((32, 28, 28, 64), np.float32) for _ in range(2))
    scale = np.ones(64, np.float32)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))

    with bngrad.Client(target) as client:
        v3 = client.fused_batch_norm_grad_v3(y_backprop, x, scale, mean, variance, None, epsilon=1e-3)
        print("FusedBatchNormGradV3", v3.x_backprop.shape, v3.scale_backprop[:3], v3.offset_backprop[:3])

        inverse_std = 1 / np.sqrt(variance + np.float32(1e-3))  # what PyTorch and cuDNN save
        v2 = client.fused_batch_norm_grad_v2(
            y_backprop, x, scale, mean, inverse_std, epsilon=1e-3, reserve_space_2_kind="inverse_std"
        )
        print("FusedBatchNormGradV2", v2.x_backprop.shape, v2.scale_backprop[:3], v2.offset_backprop[:3])

        onednn = client.batch_norm_training_backprop(x, y_backprop, mean, variance, scale, epsilon=1e-3)
        print("BatchNormTrainingBackprop", onednn.input_delta.shape, onednn.gamma_delta[:3], onednn.beta_delta[:3])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="the server: HOST:PORT or unix:PATH")
    target = parser.parse_args().target
    try:
        if target is not None:
            main(target)
        else:
            with EmbeddedServer() as server:
                main(server.target)
    except (bngrad.BngradError, ServerStartError) as error:
        sys.exit(f"{parser.prog}: {error}")
