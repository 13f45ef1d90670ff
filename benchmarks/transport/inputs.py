"""The inputs: NHWC float32 tensors of an exact size. KB and MB are 2**10 and 2**20 bytes."""

from __future__ import annotations

import math
import re

import numpy as np
from benchmarks.kernels import cases

from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import FLOAT32, Spec

KB, MB = 1 << 10, 1 << 20
_CHANNELS = 64
_PIXEL_NBYTES = _CHANNELS * FLOAT32.itemsize
_IMAGE_SIDE = 64


def size(text: str) -> int:
    """Parses the size of one tensor: "4KB", "1MB" and so on.

    Raises:
        ValueError: The text is not a size, or not a multiple of a pixel of 64 channels.
    """
    match = re.fullmatch(r"(\d+)\s*([KM])B?", text.upper())
    if match is None:
        raise ValueError(f"a size is a whole number of KB or MB, not {text!r}")
    nbytes = int(match[1]) * (KB if match[2] == "K" else MB)
    if not nbytes or nbytes % _PIXEL_NBYTES:
        raise ValueError(f"a size must be a multiple of {_PIXEL_NBYTES} bytes, not {nbytes}")
    return nbytes


def label(nbytes: int) -> str:
    return f"{nbytes // MB} MB" if nbytes % MB == 0 else f"{nbytes // KB} KB"


def problem(nbytes: int) -> Problem:
    """Returns a problem with tensors of this size and normally distributed numbers."""
    spec = Spec(FLOAT32, _shape(nbytes), 3)
    return cases.problem(spec, *np.random.default_rng(nbytes).standard_normal((2, *spec.shape), np.float32))


def _shape(nbytes: int) -> tuple[int, int, int, int]:
    pixels = nbytes // _PIXEL_NBYTES
    images, rest = divmod(pixels, _IMAGE_SIDE**2)
    if not rest:
        return images, _IMAGE_SIDE, _IMAGE_SIDE, _CHANNELS
    side = math.isqrt(pixels)
    return (1, side, side, _CHANNELS) if side * side == pixels else (1, 1, pixels, _CHANNELS)
