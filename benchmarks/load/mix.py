"""The mix of requests: the batch-norm layers of ResNet-50, as often as it has them, and some tiny ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.kernels import cases

from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import BFLOAT16, FLOAT32, Spec

BATCH = 2
"""Images in a request: tensors of 100 KB to 6.4 MB."""
LAYERS = dict(zip(cases.RESNET50, (1, 6, 4, 8, 5, 12, 7, 6, 4), strict=True))
"""(C, H, W) of ResNet-50's 53 batch-norm layers, and how many there are of each."""
VARIANTS = tuple((dtype, layout) for dtype in (FLOAT32, BFLOAT16) for layout in cases.LAYOUTS)
"""Every layer is requested equally often in each."""
SMALL = Spec(FLOAT32, (1, 4, 4, 64), 3)
"""A request with tensors of 4 KB."""
SMALL_COUNT = 24
"""Their number beside the 4 x 53 layers: a tenth of all requests."""


@dataclass(frozen=True)
class Item:
    """A kind of request, and how often it is in a deck, which holds every kind in proportion."""

    spec: Spec
    count: int

    @property
    def nbytes(self) -> int:
        """The bytes of a request and its answer: y_backprop, x and x_backprop."""
        return 3 * self.spec.tensor_nbytes

    @property
    def data_format(self) -> str:
        return "NHWC" if self.spec.channel_axis == 3 else "NCHW"

    def __str__(self) -> str:
        return f"{self.data_format} {self.spec.dtype.name:8} {'x'.join(map(str, self.spec.shape))}"


def _layer(dtype: np.dtype[Any], layout: str, chw: tuple[int, int, int]) -> Spec:
    channels, height, width = chw
    if layout == "NHWC":
        return Spec(dtype, (BATCH, height, width, channels), 3)
    return Spec(dtype, (BATCH, *chw), 1)


MIXED = (
    *(Item(_layer(dtype, layout, chw), count) for chw, count in LAYERS.items() for dtype, layout in VARIANTS),
    Item(SMALL, SMALL_COUNT),
)
"""The mix of most measurements."""
TINY = (Item(SMALL, 1),)
"""Only tiny requests, of which many fit in a batch."""


def problem(item: Item, seed: int) -> Problem:
    """Returns the inputs of a kind of request: normally distributed numbers by seed."""
    shape = item.spec.shape
    rng = np.random.default_rng(seed)
    return cases.problem(item.spec, *(rng.standard_normal(shape, np.float32) for _ in range(2)))


def deal(items: tuple[Item, ...], count: int, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns ``count`` indices of items from shuffled decks, so that every stretch costs about the same."""
    deck = np.repeat(np.arange(len(items)), [item.count for item in items])
    decks = [rng.permutation(deck) for _ in range(-(-count // len(deck)))]
    return np.concatenate(decks)[:count] if decks else deck[:0]


@functools.cache
def mean_nbytes(items: tuple[Item, ...]) -> float:
    """Returns the mean bytes of a request and its answer."""
    return sum(item.count * item.nbytes for item in items) / sum(item.count for item in items)
