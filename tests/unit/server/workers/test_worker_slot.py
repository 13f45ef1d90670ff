"""Slots: whether a batch is blamed for a worker's death, when changes of regions are sent, and busy time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest
from tests.clock import Clock
from tests.unit.server.scheduling.workers import SPEC, job

from bngrad_kernels.spec import BFLOAT16, FLOAT32, Spec
from bngrad_server.errors import WorkerDiedError
from bngrad_server.memory.regions import Region
from bngrad_server.workers import worker_slot
from bngrad_server.workers.ipc import MAX_FDS, MAX_PACKET_NBYTES, OK, Message, split_batch, unpickled
from bngrad_server.workers.worker_slot import BusyTime, WorkerSlot
from bngrad_wire.http2 import set_timeout

REGION_FD = os.memfd_create("region")
SPEC_AND_BATCH = 2
"""How many packets a slot sends with the first batch of a spec."""


@pytest.fixture
def slot() -> Iterator[WorkerSlot]:
    slot = WorkerSlot(BusyTime())
    set_timeout(slot._socket, 10.0)  # so that no test hangs
    with slot.theirs, contextlib.closing(slot._socket):
        yield slot


def begin(slot: WorkerSlot) -> None:
    assert slot.take()
    slot.begin([(job(), range(SPEC.channels))])


def region(number: int) -> Region:
    return Region(number, b"", REGION_FD, 1, "")


def map_region(slot: WorkerSlot, number: int = 1) -> None:
    slot.change_region(number, region(number))


@pytest.mark.parametrize(
    ("tell", "packets_read", "saw_batch"),
    [
        pytest.param([begin], 0, False, id="nothing read"),
        pytest.param([begin], SPEC_AND_BATCH - 1, False, id="only what comes before the batch read"),
        pytest.param([begin], SPEC_AND_BATCH, True, id="the batch read"),
        pytest.param([map_region, begin], 1, False, id="a region was mapped before"),
        pytest.param([begin, map_region], 0, False, id="a region was to be mapped after"),
        pytest.param([begin, map_region], SPEC_AND_BATCH, True, id="a region was to be mapped after, the batch read"),
    ],
)
def test_a_batch_is_not_blamed_for_the_death_of_a_worker_that_never_read_it(
    slot: WorkerSlot, tell: list[Callable[[WorkerSlot], None]], packets_read: int, saw_batch: bool
) -> None:
    for each in tell:
        each(slot)
    for _ in range(packets_read):
        slot.theirs.recv(MAX_PACKET_NBYTES)
    slot.theirs.close()
    with pytest.raises(WorkerDiedError) as raised:
        slot.finish()
    assert raised.value.saw_batch is saw_batch


@pytest.mark.parametrize(("packets_read", "saw_batch"), [(0, False), (SPEC_AND_BATCH, True)])
def test_a_worker_that_is_shut_down_can_answer_until_it_has_ended(
    slot: WorkerSlot, packets_read: int, saw_batch: bool
) -> None:
    begin(slot)
    for _ in range(packets_read):
        slot.theirs.recv(MAX_PACKET_NBYTES)
    with ThreadPoolExecutor() as threads:
        end = threads.submit(slot.finish)
        slot.shut_down()
        with pytest.raises(FutureTimeoutError):
            end.result(0.1)
        slot.theirs.close()
        with pytest.raises(WorkerDiedError) as raised:
            end.result(10)
    assert raised.value.saw_batch is saw_batch


def test_a_batch_is_not_blamed_for_a_worker_that_died_before(slot: WorkerSlot) -> None:
    slot.theirs.close()
    with pytest.raises(WorkerDiedError) as raised:
        begin(slot)
    assert not raised.value.saw_batch


def test_a_busy_worker_is_told_of_regions_after_its_batch(slot: WorkerSlot) -> None:
    map_region(slot, 1)
    begin(slot)
    map_region(slot, 2)
    map_region(slot, 3)
    slot.change_region(2, None)
    slot.change_region(1, None)
    assert [kind for kind, _ in received(slot)] == [Message.REGIONS, Message.SPEC, Message.RUN]
    slot.theirs.send(OK)
    assert slot.finish() is None
    assert received(slot) == [(Message.REGIONS, [(3, 1), (1, None)])]
    map_region(slot, 4)
    assert received(slot) == [(Message.REGIONS, [(4, 1)])]


def test_a_batch_is_computed_whatever_becomes_of_its_worker_after_the_answer(slot: WorkerSlot) -> None:
    begin(slot)
    map_region(slot)
    received(slot)
    slot.theirs.send(OK)
    slot.theirs.close()
    assert slot.finish() is None


def test_a_worker_that_reads_nothing_is_told_of_regions_without_waiting(slot: WorkerSlot) -> None:
    for number in range(1000):  # far more than a socket has room for
        map_region(slot, number)
    slot.change_region(0, None)
    slot.change_region(999, None)
    received_changes = [change for _, changes in received(slot) for change in changes]
    slot.flush_pending()
    received_changes += [change for _, changes in received(slot) for change in changes]
    assert received_changes == [*((number, 1) for number in range(999)), (0, None)]


def test_a_worker_is_told_of_every_region_before_its_next_batch(slot: WorkerSlot) -> None:
    begin(slot)  # its spec is known from then on
    received(slot)
    slot.theirs.send(OK)
    slot.finish()
    for number in range(1000):
        map_region(slot, number)
    with ThreadPoolExecutor() as threads:
        begun = threads.submit(begin, slot)
        with pytest.raises(FutureTimeoutError):
            begun.result(0.1)
        packets: list[tuple[bytes, Any]] = []
        while not packets or packets[-1][0] != Message.RUN:
            packets += received(slot)
        begun.result(10)
    assert sum(len(changes) for kind, changes in packets if kind == Message.REGIONS) == 1000


def test_a_number_means_one_spec_in_a_batch_even_when_numbers_are_reused(
    slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bngrad_server.workers.worker_slot._MAX_SPECS", 4)
    specs = [Spec(FLOAT32, (2, channels), channel_axis=1) for channels in range(1, 7)]
    known: dict[int, Spec] = {}
    for batch in (specs[:4], [specs[0], specs[4], specs[5]], [specs[1]], specs):
        assert slot.take()
        slot.begin([(job(spec=spec), range(spec.channels)) for spec in batch])
        while (packet := slot.theirs.recv(MAX_PACKET_NBYTES))[:1] == Message.SPEC:
            number, known[number] = unpickled(packet[1:])
        tasks = split_batch(memoryview(packet)[1:], known)
        assert [known[int.from_bytes(task[:4], "little")] for task in tasks] == batch
        slot.theirs.send(OK)
        slot.finish()


def test_a_worker_keeps_a_limited_number_of_specs(slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bngrad_server.workers.worker_slot._MAX_SPECS", 4)
    numbers = set[int]()
    for channels in range(1, 13):
        assert slot.take()
        slot.begin([(job(spec=Spec(FLOAT32, (2, channels), channel_axis=1)), range(channels))])
        while (packet := slot.theirs.recv(MAX_PACKET_NBYTES))[:1] == Message.SPEC:
            numbers.add(unpickled(packet[1:])[0])
        slot.theirs.send(OK)
        slot.finish()
    assert numbers == set(range(4))


def received(slot: WorkerSlot) -> list[tuple[bytes, Any]]:
    """The kinds of the packets that the worker was sent, and their changes of regions."""
    slot.theirs.setblocking(False)
    packets = []
    with contextlib.suppress(BlockingIOError):
        while True:
            packet, fds, _, _ = socket.recv_fds(slot.theirs, MAX_PACKET_NBYTES, MAX_FDS)
            changes = unpickled(packet[1:]) if packet[:1] == Message.REGIONS else []
            assert len(fds) == sum(nbytes is not None for _, nbytes in changes)
            packets.append((packet[:1], changes))
            for fd in fds:
                os.close(fd)
    return packets


def test_the_time_in_which_several_slots_are_busy_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy_time = Clock(), BusyTime()
    monkeypatch.setattr(worker_slot, "time", clock)
    totals = []
    for step in (busy_time.begin, busy_time.begin, busy_time.end, busy_time.end) * 2:
        step()
        totals.append(busy_time.total_s)
        clock.now += 1
    assert totals == [0, 0, 0, 3, 3, 3, 3, 6]


def test_a_slot_is_late_amid_a_batch_alone(slot: WorkerSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bngrad_server.workers.worker_slot._BATCH_TIMEOUT_S", -1.0)
    assert not slot.is_late
    begin(slot)
    assert slot.is_late
    slot.theirs.send(OK)
    assert slot.finish() is None
    assert not slot.is_late


OTHER_DTYPE, OTHER_ORDER = (dataclasses.replace(SPEC, **change) for change in ({"dtype": BFLOAT16}, {"order": 2}))


@pytest.mark.parametrize(
    ("compiles", "before", "before_s", "spec", "nbytes", "late_s"),
    [
        pytest.param(False, [], 0, SPEC, 0, 30, id="small"),
        pytest.param(False, [], 0, SPEC, 200_000_000, 40, id="large"),
        pytest.param(True, [], 0, SPEC, 0, 300, id="first of all"),
        pytest.param(True, [SPEC], 100, SPEC, 0, 200, id="kernel that may be being compiled"),
        pytest.param(True, [OTHER_DTYPE, OTHER_ORDER, SPEC], 300, SPEC, 0, 30, id="known kernel"),
        pytest.param(True, [SPEC], 100, OTHER_DTYPE, 0, 300, id="first of a dtype"),
        pytest.param(True, [SPEC], 100, OTHER_ORDER, 0, 300, id="first of an order"),
    ],
)
def test_a_batch_has_time_for_its_bytes_and_for_the_compiler_where_its_kernel_is_new(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, before: list[Spec], before_s: float, spec: Spec, nbytes: int,
    late_s: float,
) -> None:  # fmt: skip
    clock, busy_time = Clock(), BusyTime()
    monkeypatch.setattr(worker_slot, "time", clock)
    slot = WorkerSlot(busy_time, compiles=compiles)
    with slot.theirs, contextlib.closing(slot._socket):
        for each in before:
            assert slot.take()
            slot.begin([(job(spec=each), range(each.channels))])
            slot.theirs.send(OK)
            slot.finish()
        clock.now += before_s
        assert slot.take()
        slot.begin([(job(spec=spec, nbytes=nbytes), range(spec.channels))])
        clock.now += late_s
        assert not slot.is_late
        clock.now += 0.5
        assert slot.is_late
        slot.theirs.send(OK)
        slot.finish()
    assert busy_time.total_s == late_s + 0.5
