"""The layers of a model: the shapes of the inputs of its batch normalisations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import click

DataFormat = Literal["NCHW", "NHWC"]

_OPTION = "'--model'"
_MAX_ELEMENTS = 1 << 31
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)(?:\*(\d+))?")

_RESNET50 = {
    (64, 112): 1, (64, 56): 6, (256, 56): 4, (128, 56): 1, (128, 28): 7, (512, 28): 5, (256, 28): 1, (256, 14): 11,
    (1024, 14): 7, (512, 14): 1, (512, 7): 5, (2048, 7): 4,
}  # fmt: skip
"""The number of batch normalisations, by their channels and the size of their image."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Batch normalisations of a model whose inputs have the same shape.

    Attributes:
        shape: The shape, in the order of the data format.
        count: How many there are.
    """

    shape: tuple[int, int, int, int]
    count: int

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))


def resnet50(batch: int, data_format: DataFormat) -> list[Layer]:
    """Returns the layers of ResNet-50 for images of 224 x 224."""
    if data_format == "NCHW":
        return [Layer((batch, channels, size, size), count) for (channels, size), count in _RESNET50.items()]
    return [Layer((batch, size, size, channels), count) for (channels, size), count in _RESNET50.items()]


def parse(text: str) -> list[Layer]:
    """Reads shapes such as ``32x64x56x56*6,32x128x28x28``; the number after the asterisk is the count.

    Raises:
        click.BadParameter: A shape is malformed, empty or too large, or a count is 0.
    """
    layers = []
    for part in text.split(","):
        found = _SHAPE.fullmatch(part.strip())
        if found is None:
            expected = "resnet50, or shapes such as 32x64x56x56*6,32x128x28x28"
            raise click.BadParameter(f"it should be {expected}, not {text!r}", param_hint=_OPTION)
        a, b, c, d, count = (int(number or 1) for number in found.groups())
        if count == 0:
            raise click.BadParameter(f"the count of {part.strip()} should be at least one", param_hint=_OPTION)
        if not 0 < a * b * c * d <= _MAX_ELEMENTS:
            expected = "at least one and at most 2**31 elements"
            raise click.BadParameter(f"{part.strip()} should have {expected}", param_hint=_OPTION)
        layers.append(Layer((a, b, c, d), count))
    return layers
