"""The bits of a thousand problems on the CPU."""

from __future__ import annotations

from tests.kernels.backends import create
from tests.kernels.cpu import fixed_bits


def test_a_thousand_problems_have_the_bits_that_they_have_on_every_processor() -> None:
    digests = [fixed_bits.digest(number, create("cpu")) for number in range(fixed_bits.PROBLEMS)]
    assert digests == fixed_bits.expected()
