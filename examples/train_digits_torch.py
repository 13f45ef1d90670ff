"""Trains a network on scikit-learn's digits, with PyTorch alone and with bngrad, and compares the losses.

python examples/train_digits_torch.py localhost:50051 [--plot losses.png]
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import bngrad
import bngrad.torch

STEPS = 120
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="the server's address")
    parser.add_argument("--plot", metavar="PNG", help="draws the losses")
    options = parser.parse_args()
    stock = train(network())
    with bngrad.Client(options.target) as client:
        ours = train(bngrad.torch.convert_batchnorm(network(), client))  # the one line
    difference = max(abs(a - b) for a, b in zip(stock, ours, strict=True))
    print(f"loss after {STEPS} steps: {stock[-1]:.4f} with PyTorch, {ours[-1]:.4f} with bngrad")
    print(f"the losses differ by {difference:.1e} at most")
    if options.plot:
        plot(options.plot, {"PyTorch": stock, "PyTorch with bngrad": ours})


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
    losses = []
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,), generator=order)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def plot(path: str, curves: dict[str, list[float]]) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415 - only the drawing needs it

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for (label, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(losses, style, label=label)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="scikit-learn's digits")
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
