"""Memory that the slots of a worker share."""

from __future__ import annotations

import mmap

import pytest
from tests.unit.server.workers.devices import Device

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
