"""The operations that NumPy lacks, against exact fractions."""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bngrad_kernels.cpu.uncompiled.arithmetic import add_in_order, add_products_in_order, fma, rounded
from bngrad_kernels.spec import BFLOAT16, FLOAT32

FLOAT64 = np.dtype(np.float64)

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


def nearest(value: Fraction, dtype: np.dtype[Any]) -> float:
    """The nearest number of a type, the even one of two."""
    finfo: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    exponent = math.frexp(value)[1] if value else 0
    unit = Fraction(2) ** (max(exponent, finfo.minexp + 1) - finfo.nmant - 1)
    found = round(value / unit) * unit  # Python rounds to even
    return float(found) if abs(found) <= Fraction(float(finfo.max)) else math.copysign(math.inf, value.numerator)


@given(numbers, numbers, numbers)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    with np.errstate(all="ignore"):
        (found,) = fma(*(np.array([value], np.float32) for value in (a, b, c)))
    assert found == nearest(exact, FLOAT32)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [0, 100, -100, -126])
def test_fma_rounds_once_where_float64_would_end_half_way(sign: int, exponent: int) -> None:
    a, b, c = sign * (1 + 2**-15) * 2.0**exponent, (1 - 2**-15) * 2**-24, sign * (1 + 2**-23) * 2.0**exponent
    (found,) = fma(*(np.array([value], np.float32) for value in (a, b, c)))
    assert found == nearest(Fraction(a) * Fraction(b) + Fraction(c), FLOAT32)
    assert found == c != np.float32(a * b + c)


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [(math.inf, 1, 1, math.inf), (math.inf, 0, 1, math.nan), (1, math.nan, 1, math.nan), (1, 1, -math.inf, -math.inf),
     (2.0**100, 2.0**100, 0, math.inf), (2.0**-149, 0.5, 0, 0.0)],
)  # fmt: skip
def test_fma_of_what_is_not_finite(a: float, b: float, c: float, expected: float) -> None:
    with np.errstate(all="ignore"):
        found = fma(*(np.array([value], np.float32) for value in (a, b, c)))
    np.testing.assert_array_equal(found, np.float32(expected))


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([FLOAT32, BFLOAT16]))
def test_a_float64_is_rounded_once(value: float, dtype: np.dtype[Any]) -> None:
    with np.errstate(all="ignore"):
        (found,) = rounded(np.array([value]), dtype)
    assert float(found) == nearest(Fraction(value), dtype)


def test_a_float64_just_above_a_tie_of_bfloat16_is_rounded_up() -> None:
    (found,) = rounded(np.array([1 + 2**-8 + 2**-40]), BFLOAT16)
    assert float(found) == 1 + 2**-7


def test_terms_are_added_one_after_the_other() -> None:
    terms = np.array([2**-53, 2**-53, 1] * 50, np.float32)[:, np.newaxis]
    assert add_in_order(np.ones(1), terms) == 51  # in another order, the small ones would count


differences = st.builds(operator.sub, numbers, numbers)
"""Of float32, as the second order multiplies."""


@given(st.lists(st.tuples(differences, differences), min_size=1, max_size=5))
def test_each_product_is_added_with_one_rounding(factors: list[tuple[float, float]]) -> None:
    total = 0.0
    for a, b in factors:
        total = nearest(Fraction(a) * Fraction(b) + Fraction(total), FLOAT64)
    a64, b64 = np.array(factors).T[:, :, np.newaxis]
    with np.errstate(all="ignore"):
        assert add_products_in_order(np.zeros(1), a64, b64) == total


def test_a_product_is_added_with_one_rounding_where_two_would_end_half_way() -> None:
    total, a, b = np.array([2.0**53 + 2]), np.array([[1 + 2.0**-27]]), np.array([[1 - 2.0**-27]])
    assert add_products_in_order(total, a, b) == total  # the product is just below 1, half of the last bit


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(math.inf, 2, math.inf), (-math.inf, 2, -math.inf), (math.inf, 0, math.nan), (math.nan, 1, math.nan)],
)
def test_products_that_are_not_finite_are_added(a: float, b: float, expected: float) -> None:
    with np.errstate(all="ignore"):
        found = add_products_in_order(np.ones(1), np.full((3, 1), a), np.full((3, 1), b))
    np.testing.assert_array_equal(found, expected)
