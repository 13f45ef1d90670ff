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
    """``a * b + c``, rounded once.

    A float64 holds the product exactly. To round their sum to float64 and then to float32 differs only where the first
    rounding ends half-way between two float32: there the exact sum decides, which rounding to odd preserves (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product = np.multiply(a, b, dtype=np.float64)
    product, c = np.broadcast_arrays(product, c)
    total = product + c
    nearest = total.astype(np.float32)
    doubtful = ((total.view(np.int64) & _LOWEST_BITS) == 0) & (total != nearest)
    if doubtful.any():
        nearest[doubtful] = _odd_sum(product[doubtful], c[doubtful].astype(np.float64)).astype(np.float32)
    return nearest


def add_in_order(sums: Float64Array, terms: Array) -> Float64Array:
    """Adds terms, along their first axis, to sums in float64: one after the other, where `numpy.sum` adds pairs."""
    return np.add.accumulate(np.concatenate((sums[np.newaxis], terms)), dtype=np.float64)[-1]


def add_products_in_order(sums: Float64Array, a: Float64Array, b: Float64Array) -> Float64Array:
    """Adds the products of two arrays, along their first axis, to sums: each with one rounding."""
    for product, rest in zip(*_exact_products(a, b), strict=True):
        sums = _add_product(sums, product, rest)
    return sums


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
    total, rest = _exact_sum(a, b)
    is_even = (total.view(np.int64) & 1) == 0
    return np.where((np.abs(rest) > 0) & is_even, np.nextafter(total, np.copysign(np.inf, rest)), total)


def _exact_sum(a: Float64Array, b: Float64Array) -> tuple[Float64Array, Float64Array]:
    """``a + b``, and what its rounding has cut off."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _exact_products(a: Float64Array, b: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The products, and what their rounding has cut off (Dekker, "A floating-point technique", 1971)."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(a: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Two numbers of at most 26 bits, whose sum a is."""
    scaled = 134_217_729.0 * a  # 2**27 + 1
    high = scaled - (scaled - a)
    return high, a - high


def _add_product(c: Float64Array, product: Float64Array, rest: Float64Array) -> Float64Array:
    """``c + product + rest``, rounded once, as Boldo and Melquiond do it."""
    low, low_rest = _exact_sum(c, rest)
    high, high_rest = _exact_sum(product, low)
    total = c + product
    return np.where(np.isfinite(total), high + _odd_sum(low_rest, high_rest), total)
