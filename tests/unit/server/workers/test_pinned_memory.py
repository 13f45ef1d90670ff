"""Memory that the slots of a worker share."""

from __future__ import annotations

import mmap

import pytest
from tests.unit.server.workers.devices import Device

from bngrad_kernels.problem import Array
from bngrad_server.workers.pinned_memory import PinnedMemory

ARENA, PINNED_NBYTES = 1 << 16, 1 << 20


def region() -> memoryview:
    return memoryview(mmap.mmap(-1, 1 << 14))


@pytest.mark.parametrize(
    ("steps", "is_mapped"),
    [
        pytest.param("++-", True, id="while a slot uses it"),
        pytest.param("++--", False, id="until the last has removed it"),
        pytest.param("+-", False, id="before the other has added it"),
        pytest.param("+-+", True, id="once the other has added it afterwards"),
        pytest.param("+-+-", False, id="and has removed it, too"),
    ],
)
def test_memory_is_mapped_and_page_locked_while_a_slot_uses_it(steps: str, is_mapped: bool) -> None:
    device = Device()
    memories = PinnedMemory(memoryview(mmap.mmap(-1, ARENA)), device, PINNED_NBYTES)
    for step in steps:
        memories.add(7, region()) if step == "+" else memories.remove(7)
        assert len(device.locked) <= 2
    assert (7 in memories.mapped) == is_mapped
    assert device.locked == [ARENA, 1 << 14][: 1 + is_mapped]


def test_slots_see_the_same_memory() -> None:
    memories = PinnedMemory(memoryview(mmap.mmap(-1, ARENA)), Device(), PINNED_NBYTES)
    first = region()
    memories.add(7, first)
    memories.add(7, region())
    assert memories.mapped[7] is first


def test_no_more_is_page_locked_than_may_be() -> None:
    device = Device()
    memories = PinnedMemory(memoryview(mmap.mmap(-1, ARENA)), device, ARENA + (1 << 14))
    for number in (1, 2):
        memories.add(number, region())
    assert device.locked == [ARENA, 1 << 14]
    assert {1, 2} <= set(memories.mapped)


def test_what_is_page_locked_no_longer_makes_room_for_other_memory() -> None:
    device = Device()
    memories = PinnedMemory(memoryview(mmap.mmap(-1, ARENA)), device, ARENA + (1 << 14))
    for number in (1, 2):
        memories.add(number, region())
        memories.remove(number)
    memories.add(3, region())
    assert device.locked == [ARENA, 1 << 14]


def test_memory_that_cannot_be_page_locked_is_used_without() -> None:
    class FullDevice(Device):
        def register(self, memory: Array) -> None:
            raise MemoryError

    memories = PinnedMemory(memoryview(mmap.mmap(-1, ARENA)), FullDevice(), PINNED_NBYTES)
    memories.add(7, region())
    assert 7 in memories.mapped
    memories.remove(7)
    assert 7 not in memories.mapped
