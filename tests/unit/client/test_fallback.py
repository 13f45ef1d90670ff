"""When calls are computed in this process, with errors that the tests make."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bngrad._errors import BngradError, DeadlineExceededError, UnavailableError
from bngrad._local.fallback import Fallback

LATE, GONE = DeadlineExceededError("late"), UnavailableError("gone")


@pytest.mark.parametrize(
    ("outcomes", "in_outage"),
    [
        ([GONE], True),
        ([LATE], False),
        ([LATE, LATE], True),
        ([LATE, None, LATE], False),
        ([LATE, GONE], True),
        ([LATE, LATE, None], False),
        ([LATE, LATE, None, LATE], False),
    ],
)
def test_an_outage_begins_with_a_server_that_has_gone_or_two_late_calls_in_a_row(
    outcomes: Sequence[BngradError | None], in_outage: bool
) -> None:
    fallback = Fallback("a client")
    for error in outcomes:
        if error is None:
            fallback.answered()
        else:
            fallback.failed(error)
    assert fallback.in_outage == in_outage
    assert fallback.is_pausing() == in_outage
