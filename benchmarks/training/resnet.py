"""A small residual network in PyTorch with nine batch normalisations, and data for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE = (3, 32, 32)
CLASSES = 10
_WIDTHS = (32, 32, 64, 64)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def small_resnet(widths: tuple[int, ...] = _WIDTHS, *, seed: int = 0) -> nn.Sequential:
    """Returns the network, with the same weights for the same seed: a stem and a block for each width."""
    torch.manual_seed(seed)
    stem = [nn.Conv2d(IMAGE[0], widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    blocks = [_Block(inputs, outputs) for inputs, outputs in zip((widths[0], *widths), widths, strict=False)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)]
    return nn.Sequential(*stem, *blocks, *head)


def batches(count: int, size: int, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Returns random images of classes that differ in their mean, and the numbers of these classes."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, *IMAGE, generator=generator)
    labels = [torch.randint(CLASSES, (size,), generator=generator) for _ in range(count)]
    return [(means[each] + torch.randn(size, *IMAGE, generator=generator), each) for each in labels]
