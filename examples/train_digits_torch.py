"""Trains a network on scikit-learn's digits, with PyTorch alone and with bngrad, and compares the losses.

python examples/train_digits_torch.py localhost:50051
"""

from __future__ import annotations

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import bngrad
import bngrad.torch

STEPS = 120
BATCH = 32


def main(target: str) -> None:
    stock, ours = losses(target)
    difference = max(abs(a - b) for a, b in zip(stock, ours, strict=True))
    print(f"loss after {STEPS} steps: {stock[-1]:.4f} with PyTorch, {ours[-1]:.4f} with bngrad")
    print(f"the losses differ by {difference:.1e} at most")


def losses(target: str) -> tuple[list[float], list[float]]:
    """Returns the losses with PyTorch alone, and with bngrad."""
    with bngrad.Client(target) as client:
        ours = train(bngrad.torch.convert_batchnorm(network(), client))  # the one line
    return train(network()), ours


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*block(1, 16), nn.MaxPool2d(2), *block(16, 32), nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def train(model: nn.Module) -> list[float]:
    """Trains the model, and returns the loss of each step."""
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,), generator=order)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the server: HOST:PORT or unix:PATH")
    try:
        main(parser.parse_args().target)
    except bngrad.BngradError as error:
        sys.exit(f"{parser.prog}: {error}")
