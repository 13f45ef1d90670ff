"""Tensors in shared memory that GPUs copy ahead: whose tickets stand for which copies, and until when."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from bngrad_kernels.spec import InvalidArgumentError, TensorHeader
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.memory.ahead import COPIED_NBYTES, AheadTensors, ConnectionTickets
from bngrad_server.memory.ahead_places import AheadPlaces
from bngrad_server.memory.arena import Arena
from bngrad_server.memory.layout import Place
from bngrad_server.memory.regions import Region, Regions

ROOM = 3
"""How many tensors fit into a region."""


class Copier:
    """The copies that GPUs have, by their numbers."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[Place, int]] = {}
        self._last = 0

    def copy_ahead(self, place: Place, nbytes: int) -> int:
        self._last += 1
        self.copies[self._last] = place, nbytes
        return self._last

    def drop_copy(self, number: int) -> None:
        del self.copies[number]


def header(nbytes: int = COPIED_NBYTES) -> TensorHeader:
    return TensorHeader(np.dtype(np.float32), (nbytes // 4, 1), nbytes)


class Memory:
    """Regions, and the tensors there that GPUs copy."""

    def __init__(self) -> None:
        self.copier = Copier()
        self.regions = Regions(1 << 30, lambda region: None, self._end)
        self.places = AheadPlaces(self.regions, self.copier)
        self.region = self.regions.lease(ROOM * COPIED_NBYTES, "one")
        self.tickets: ConnectionTickets = set()

    def _end(self, region: Region) -> None:
        self.places.end_region(region)

    def location(self, index: int = 0, region: Region | None = None) -> pb.Location:
        return pb.Location(region_key=(region or self.region).key, offset=index * COPIED_NBYTES)

    def keep(self, index: int = 0, client: str = "one", region: Region | None = None) -> bytes:
        return self.places.keep(header(), self.location(index, region), client, self.tickets)

    def copy_of(self, ticket: bytes, index: int = 0, nbytes: int = COPIED_NBYTES, client: str = "one") -> int:
        place = Place(self.region.number, index * COPIED_NBYTES)
        return self.places.copied(place, nbytes, ticket, client).ahead


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    for region in made.regions:
        os.close(region.fd)


def test_a_ticket_stands_for_the_copy_of_its_place(memory: Memory) -> None:
    tickets = [memory.keep(index) for index in range(ROOM)]
    assert {len(ticket) for ticket in tickets} == {16}
    assert list(memory.copier.copies.values()) == [
        (Place(memory.region.number, index * COPIED_NBYTES), COPIED_NBYTES) for index in range(ROOM)
    ]
    assert [memory.copy_of(ticket, index) for index, ticket in enumerate(tickets)] == [1, 2, 3]


def test_no_other_request_gets_a_copy(memory: Memory) -> None:
    ticket = memory.keep()
    assert memory.copy_of(b"unknown") == 0
    assert memory.copy_of(ticket, index=1) == 0
    assert memory.copy_of(ticket, nbytes=COPIED_NBYTES - 4) == 0
    assert memory.copy_of(ticket, client="another") == 0
    elsewhere = Place(memory.region.number + 1, 0)
    assert memory.places.copied(elsewhere, COPIED_NBYTES, ticket, "one") == elsewhere


def test_what_is_forgotten_has_no_copy(memory: Memory) -> None:
    first, second, third = (memory.keep() for _ in range(3))
    memory.places.forget([first, first, b"unknown"], "one")
    memory.places.forget([second], "another")
    assert [memory.copy_of(ticket) for ticket in (first, second, third)] == [0, 2, 3]
    assert memory.tickets == {second, third}
    memory.tickets.add(b"of a tensor in the arena")
    memory.places.end(memory.tickets)
    assert memory.tickets == {b"of a tensor in the arena"}
    assert len(memory.places) == len(memory.copier.copies) == len(memory.places._in_region) == 0


def test_a_region_takes_its_copies_along_once_no_request_names_it(memory: Memory) -> None:
    other = memory.regions.lease(COPIED_NBYTES, "one")
    kept = memory.keep(region=other)
    memory.keep()
    held, _ = memory.regions.hold("x", memory.location(), COPIED_NBYTES)
    memory.regions.end(memory.region)
    with pytest.raises(InvalidArgumentError, match="no region that is leased"):
        memory.keep()
    assert len(memory.copier.copies) == 2
    memory.regions.release(held)
    assert list(memory.copier.copies) == [1]
    assert memory.tickets == {kept}


def test_a_region_has_as_many_as_fit_side_by_side(memory: Memory) -> None:
    tickets = [memory.keep() for _ in range(ROOM + 2)]
    assert [memory.copy_of(ticket) for ticket in tickets] == [0, 0, 3, 4, 5]
    assert list(memory.copier.copies) == [3, 4, 5]
    assert memory.tickets == set(tickets[2:])


def test_no_request_is_in_a_region_for_what_is_kept_there(memory: Memory) -> None:
    """Else the client would think that one may still write there."""
    memory.keep()
    assert memory.region.holds == 0


def test_who_does_not_lease_the_place_is_refused(memory: Memory) -> None:
    for index, client, problem in (
        (ROOM, "one", f"must end within the region's {ROOM * COPIED_NBYTES} bytes"),
        (0, "another", "must be in a region that the client of this call leases"),
    ):
        with pytest.raises(InvalidArgumentError, match=problem) as refused:
            memory.keep(index, client)
        assert [violation.field for violation in refused.value.violations] == ["tensor"]
    assert memory.region.holds == len(memory.places) == 0


def test_small_tensors_and_those_of_servers_without_gpus_have_no_ticket(memory: Memory) -> None:
    assert memory.places.keep(header(COPIED_NBYTES - 4), memory.location(), "one", memory.tickets) == b""
    without = AheadPlaces(memory.regions, None)
    assert without.keep(header(), memory.location(), "one", memory.tickets) == b""
    assert (without.least_nbytes, memory.places.least_nbytes) == (0, COPIED_NBYTES)
    assert not memory.tickets


def test_of_what_is_sent_ahead_a_gpu_copies_the_large_tensors_and_drops_them_again() -> None:
    arena, copier = Arena(4 * COPIED_NBYTES, 0), Copier()
    tensors = AheadTensors(arena, copier)
    tickets = []
    for nbytes in (COPIED_NBYTES - 256, COPIED_NBYTES):
        tickets.append(tensors.keep(header(nbytes), tensors.allocate(nbytes, "one"), set()))
    assert [nbytes for _, nbytes in copier.copies.values()] == [COPIED_NBYTES]
    tensors.forget(tickets, "one")
    assert not copier.copies
    arena.close()
