"""When calls end, and how another thread ends them earlier."""

from __future__ import annotations

import time

from bngrad._deadline import Cancellation


def test_what_is_attached_after_the_cancellation_is_called_at_once() -> None:
    cancellation, called = Cancellation(), []
    cancellation.cancel()
    with cancellation.calls(lambda: called.append(1)):
        assert called == [1]
    began = time.monotonic()
    cancellation.sleep(30.0)
    assert time.monotonic() - began < 10.0
