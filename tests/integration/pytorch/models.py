"""Layers and a network in PyTorch, with data, for the tests of bngrad.torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from benchmarks.training.resnet import batches, small_resnet
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import bngrad.torch

Batch = tuple[Tensor, Tensor]
OurClass = type[bngrad.torch.BatchNorm1d | bngrad.torch.BatchNorm2d | bngrad.torch.BatchNorm3d]
Layer = TypeVar("Layer", bound=_BatchNorm)

CHANNELS = 3
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference of a gradient from float64, as a part of the largest value."""
SHAPES: dict[str, tuple[int, ...]] = {
    "2d": (6, CHANNELS),
    "3d": (4, CHANNELS, 5),
    "4d": (4, CHANNELS, 3, 2),
    "5d": (3, CHANNELS, 2, 3, 2),
}
OURS: dict[str, OurClass] = {
    "2d": bngrad.torch.BatchNorm1d,
    "3d": bngrad.torch.BatchNorm1d,
    "4d": bngrad.torch.BatchNorm2d,
    "5d": bngrad.torch.BatchNorm3d,
}
MEMORY_FORMATS: list[tuple[str, torch.memory_format]] = [
    *((rank, torch.contiguous_format) for rank in SHAPES),
    ("4d", torch.channels_last),
    ("5d", torch.channels_last_3d),
]


def randomised(layer: Layer) -> Layer:
    """Gives a layer parameters and running statistics other than ones and zeros."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        if layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return layer


def tensors(
    rank: str, memory_format: torch.memory_format, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Returns an input and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    x, y_backprop = (torch.randn(SHAPES[rank], generator=generator).to(device, dtype) for _ in range(2))
    return x.to(memory_format=memory_format), y_backprop.to(memory_format=memory_format)


def gradients(layer: _BatchNorm, x: Tensor, y_backprop: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns a layer's output and the gradients of its input and parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return y, list(torch.autograd.grad(y, [x, *layer.parameters()], y_backprop))


def second_order(layer: _BatchNorm, x: Tensor, y_backprop: Tensor) -> list[Tensor]:
    """Returns the gradients of a penalty on a layer's gradients."""
    x, y_backprop = x.detach().requires_grad_(), y_backprop.detach().requires_grad_()
    first = torch.autograd.grad(layer(x), [x, layer.weight], y_backprop, create_graph=True)
    penalty = first[0].square().sum() + first[1].pow(3).sum()
    return list(torch.autograd.grad(penalty, [x, layer.weight, y_backprop]))


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for our, right in zip(ours, exact, strict=True):
        assert our.device == right.device
        assert (our.double() - right).abs().max() <= tolerance * right.abs().max()


def data(count: int = 8) -> list[Batch]:
    return [(images[..., ::2, ::2].clone(), labels) for images, labels in batches(count, 8)]


def network() -> nn.Sequential:
    """A residual network with nine batch normalisations."""
    return small_resnet((8, 8, 16, 16))


def train(
    model: nn.Module,
    data: Sequence[Batch],
    *,
    bfloat16: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    device: str = "cpu",
    after_step: Callable[[int], object] = lambda step: None,
) -> list[float]:
    """Trains a model, one step per batch, and returns the losses."""
    model = model.to(device, memory_format=memory_format)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for step, (images, labels) in enumerate(data):
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bfloat16):
            outputs = model(images.to(device, memory_format=memory_format))
            loss = nn.functional.cross_entropy(outputs, labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        after_step(step)
    return losses
