"""The operations of the compiled kernels that NumPy lacks, rounded as they round."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bngrad_kernels.problem import Array
from bngrad_kernels.spec import BFLOAT16

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_LOWEST_BITS = (1 << 28) - 1
"""Those of a float64 that are 0 in each float32, and half-way between two of them."""


def fma(a: Float32Array, b: Float32Array, c: Float32Array) -> Float32Array:
    """``a * b + c`` of arrays of one shape, rounded once.

    A float64 holds the product exactly. To round their sum to float64 and then to float32 differs only where the first
    rounding ends half-way between two float32: there the exact sum decides, which rounding to odd preserves (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    rounded = total.astype(np.float32)
    doubtful = ((total.view(np.int64) & _LOWEST_BITS) == 0) & (total != rounded)
    if doubtful.any():
        rounded[doubtful] = _odd_sum(product[doubtful], c[doubtful].astype(np.float64)).astype(np.float32)
    return rounded


def add_in_order(sums: Float64Array, terms: Array) -> Float64Array:
    """Adds terms, along their first axis, to sums in float64: one after the other, where `numpy.sum` adds pairs."""
    return np.add.accumulate(np.concatenate((sums[np.newaxis], terms)), dtype=np.float64)[-1]


def rounded(values: Float64Array, dtype: np.dtype[Any]) -> Array:
    """Float64 values rounded once to nearest even, to float32 or bfloat16."""
    nearest = values.astype(np.float32)
    if dtype == BFLOAT16:  # is rounded to odd first, or it would be rounded to nearest twice
        is_away = np.abs(nearest.astype(np.float64)) > np.abs(values)
        odd = (nearest.view(np.int32) - is_away.astype(np.int32)) | 1
        is_inexact = (nearest != values) & ~np.isnan(values)
        nearest = np.where(is_inexact, odd.view(np.float32), nearest)
    return nearest.astype(dtype)


def _odd_sum(a: Float64Array, b: Float64Array) -> Float64Array:
    """``a + b``, rounded to that of the two nearest float64 whose last bit is 1, unless it is exact."""
    total = a + b
    b_part = total - a
    rest = (a - (total - b_part)) + (b - b_part)
    is_even = (total.view(np.int64) & 1) == 0
    return np.where((np.abs(rest) > 0) & is_even, np.nextafter(total, np.copysign(np.inf, rest)), total)
