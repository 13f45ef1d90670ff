"""Records batch-norm gradients of a real training: a small convolutional network learns scikit-learn's digits.

    python examples/record_digits.py cli/bngrad_cli/commands/digits.npz

``bngrad demo`` sends this file. Its entries are named ``<layer>.<input of the op>``, NCHW and float32; the
variance is the biased one of the batch, without ``epsilon``.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

EPSILON = 1e-5
STEPS = 200
BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("npz", help="the file to write")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    np.savez_compressed(parser.parse_args().npz, epsilon=np.float32(EPSILON), **train())


def train() -> dict[str, Any]:
    """Trains the network; returns the inputs of its batch norms in the last step."""
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    network = nn.Sequential(*block(1, 8), nn.MaxPool2d(2), *block(8, 16), nn.MaxPool2d(2), *block(16, 32),
                            nn.Flatten(), nn.Linear(32 * 2 * 2, 10))  # fmt: skip
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for step in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,))
        recorded: dict[str, Any] = {}
        hooks = record(network, recorded) if step == STEPS - 1 else []
        loss = nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for hook in hooks:
            hook.remove()
        optimizer.step()
    accuracy = (network(images).argmax(1) == labels).float().mean()
    print(f"loss {loss:.3f} and accuracy {accuracy:.1%} after {STEPS} steps")
    return recorded


def block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs, EPSILON), nn.ReLU()]


def record(network: nn.Sequential, recorded: dict[str, Any]) -> list[Any]:
    """Makes every batch norm of a network record its inputs and the gradient of its output."""

    def forward(name: str, module: nn.BatchNorm2d, x: torch.Tensor, y: torch.Tensor) -> None:
        keep = recorded.__setitem__
        y.register_hook(lambda dy: keep(f"{name}.y_backprop", dy.numpy().copy()))  # type: ignore[no-untyped-call]
        values = {"x": x, "scale": module.weight, "mean": x.mean((0, 2, 3)), "variance": x.var((0, 2, 3), correction=0)}
        recorded.update({f"{name}.{key}": value.detach().numpy().copy() for key, value in values.items()})

    norms = [module for module in network if isinstance(module, nn.BatchNorm2d)]
    return [
        module.register_forward_hook(lambda module, inputs, y, name=f"layer{i}": forward(name, module, inputs[0], y))
        for i, module in enumerate(norms, 1)
    ]


if __name__ == "__main__":
    main()
