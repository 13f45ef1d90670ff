"""The copies that a worker makes ahead: of which memory, and until when that stays."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.server.workers.devices import Device

from bngrad_kernels.problem import Array
from bngrad_server.memory.layout import ARENA
from bngrad_server.workers.ahead_copies import AheadCopies
from bngrad_server.workers.ipc import AheadChange
from bngrad_server.workers.pinned_memory import PinnedMemory

NBYTES = 1 << 14
ROOM = 2
REGION = 7


class CopyingDevice(Device):
    """Copies bytes, of which it has room for a few."""

    def __init__(self) -> None:
        super().__init__()
        self.room = ROOM
        self.on_finish: Callable[[], object] = lambda: None

    def copy_ahead(self, memory: Array) -> Any | None:
        return Copy(self, memory.tobytes())

    def finish_copy(self, copy: Copy) -> None:
        self.on_finish()


class Copy:
    def __init__(self, device: CopyingDevice, elements: bytes) -> None:
        if not device.room:
            raise MemoryError("there is no room")
        device.room -= 1
        self.elements = elements
        self._device = device

    def __del__(self) -> None:
        if hasattr(self, "elements"):
            self._device.room += 1


@pytest.fixture
def device() -> CopyingDevice:
    return CopyingDevice()


@pytest.fixture
def memory(device: CopyingDevice) -> PinnedMemory:
    """The arena, and a region that one slot has mapped."""
    made = PinnedMemory(of(b"a" * NBYTES), device, 4 * NBYTES)
    made.add(REGION, of(b"r" * (NBYTES // 2) + b"s" * (NBYTES // 2)))
    return made


@pytest.fixture
def copies(memory: PinnedMemory, device: CopyingDevice) -> AheadCopies:
    return AheadCopies(memory, device)


def of(elements: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(elements))
    memory[:] = elements
    return memoryview(memory)


def elements(copies: AheadCopies) -> dict[int, bytes]:
    return {number: copy.elements for number, copy in copies.by_number.items()}


def test_tensors_of_the_arena_and_of_regions_are_copied_until_they_are_dropped(copies: AheadCopies) -> None:
    copies.change(AheadChange(1, ARENA, 64, 100))
    copies.change(AheadChange(2, REGION, NBYTES // 2 - 1, 3))
    assert elements(copies) == {1: b"a" * 100, 2: b"rss"}
    copies.change(AheadChange(1))
    copies.change(AheadChange(1))
    assert elements(copies) == {2: b"rss"}


def test_the_oldest_copies_make_room(copies: AheadCopies, device: CopyingDevice) -> None:
    for number in range(1, ROOM + 2):
        copies.change(AheadChange(number, REGION, 0, 8))
    assert list(copies.by_number) == [2, 3]
    copies.by_number.clear()
    device.room = 0
    copies.change(AheadChange(9, REGION, 0, 8))
    assert not copies.by_number


def test_a_region_stays_mapped_and_page_locked_until_its_copy_is_done(
    copies: AheadCopies, memory: PinnedMemory, device: CopyingDevice
) -> None:
    locked: list[list[int]] = []

    def remove() -> None:
        memory.remove(REGION)
        locked.append(list(device.locked))

    device.on_finish = remove
    copies.change(AheadChange(1, REGION, 0, 8))
    assert locked == [[NBYTES, NBYTES]]
    assert device.locked == [NBYTES]
    assert list(memory.mapped) == [ARENA]
    assert elements(copies) == {1: b"r" * 8}


def test_a_region_that_no_slot_has_mapped_is_not_copied(copies: AheadCopies, memory: PinnedMemory) -> None:
    memory.remove(REGION)
    copies.change(AheadChange(1, REGION, 0, 8))
    assert not copies.by_number
    assert REGION not in memory.mapped
