"""The format of numbers in the table of ``bngrad bench``."""

from __future__ import annotations

import pytest

from bngrad_cli.commands.bench import _short


@pytest.mark.parametrize(
    ("number", "text"),
    [(123456.7, "123457"), (99.94, "99.9"), (1, "1.00"), (0.00012345, "0.000123"), (3.2e-6, "0.000003"), (0, "0.00")],
)
def test_a_number_is_short_and_has_no_exponent(number: float, text: str) -> None:
    assert _short(number) == text
