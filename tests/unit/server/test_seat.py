"""Seats: whose fault a worker's end is, and that the time in which any of them is busy counts once."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import pytest
from tests.unit.server.workers import SPEC, job

from bngrad_server.crew import WorkerDiedError
from bngrad_server.seat import BusyTime, MappedRegion, Seat
from bngrad_server.worker import MAX_PACKET_NBYTES

SPEC_AND_BATCH = 2
"""How many packets a seat sends that has not heard of the layout yet."""


@pytest.fixture
def seat() -> Iterator[Seat]:
    seat = Seat(BusyTime())
    with seat.theirs, contextlib.closing(seat._socket):
        yield seat


def begin(seat: Seat) -> None:
    assert seat.take()
    seat.begin([(job(), range(SPEC.channels))])


def map_region(seat: Seat) -> None:
    fd = os.memfd_create("region")
    with os.fdopen(fd):
        seat.map(1, MappedRegion(fd, 1))


@pytest.mark.parametrize(
    ("tell", "packets_read", "saw_batch"),
    [
        pytest.param([begin], 0, False, id="nothing read"),
        pytest.param([begin], SPEC_AND_BATCH - 1, False, id="only what comes before the batch read"),
        pytest.param([begin], SPEC_AND_BATCH, True, id="the batch read"),
        pytest.param([map_region, begin], 1, False, id="a region was mapped before"),
        pytest.param([begin, map_region], SPEC_AND_BATCH, True, id="only what comes after the batch not read"),
    ],
)
def test_a_batch_is_not_blamed_for_the_end_of_who_never_read_it(
    seat: Seat, tell: list[Callable[[Seat], None]], packets_read: int, saw_batch: bool
) -> None:
    for each in tell:
        each(seat)
    for _ in range(packets_read):
        seat.theirs.recv(MAX_PACKET_NBYTES)
    seat.theirs.close()
    with pytest.raises(WorkerDiedError) as raised:
        seat.finish()
    assert raised.value.saw_batch is saw_batch


def test_a_batch_is_not_blamed_for_who_ended_before_it_came(seat: Seat) -> None:
    seat.theirs.close()
    with pytest.raises(WorkerDiedError) as raised:
        begin(seat)
    assert not raised.value.saw_batch


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
