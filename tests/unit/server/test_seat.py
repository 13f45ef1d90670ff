"""Seats: the time in which any of them is busy counts once."""

from __future__ import annotations

import time

from bngrad_server.seat import BusyTime


def test_the_time_in_which_several_are_busy_counts_once() -> None:
    busy_time, begin = BusyTime(), time.monotonic()
    for _ in range(3):
        busy_time.begin()
        busy_time.begin()
        before = busy_time.total_s
        busy_time.end()
        assert busy_time.total_s == before
        busy_time.end()
        assert before < busy_time.total_s <= time.monotonic() - begin
