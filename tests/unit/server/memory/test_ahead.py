"""Tensors that were sent ahead: whose memory they take, and who loses some when there is too little."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from bngrad_kernels.spec import InvalidArgumentError, TensorHeader
from bngrad_server.errors import OverloadedError, UnknownTicketError
from bngrad_server.memory.ahead import AheadTensor, AheadTensors, ConnectionTickets
from bngrad_server.memory.arena import Arena

NBYTES = 2**16
ROOM = 8
HEADER = TensorHeader(np.dtype(np.float32), (NBYTES // 4, 1), NBYTES)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(2 * ROOM * NBYTES, 0)
    yield arena
    arena.close()


@pytest.fixture
def tensors(arena: Arena) -> AheadTensors:
    return AheadTensors(arena)


def keep(tensors: AheadTensors, client: str = "one", tickets: ConnectionTickets | None = None) -> bytes:
    return tensors.keep(HEADER, tensors.allocate(NBYTES, client), set() if tickets is None else tickets)


def is_there(tensors: AheadTensors, ticket: bytes, client: str = "one") -> bool:
    try:
        tensors.check("x", ticket, client, HEADER.dtype, HEADER.shape)
    except UnknownTicketError:
        return False
    return True


def test_one_client_gets_half_of_the_arena(tensors: AheadTensors, arena: Arena) -> None:
    tickets = [keep(tensors) for _ in range(ROOM)]
    assert len(set(tickets)) == ROOM
    assert tensors.nbytes == tensors.nbytes_of("one") == arena.used_bytes == ROOM * NBYTES
    with pytest.raises(OverloadedError, match="65536 bytes"):
        keep(tensors)
    assert all(is_there(tensors, ticket) for ticket in tickets)


def test_a_client_with_less_takes_from_the_one_with_most_its_oldest_first(tensors: AheadTensors) -> None:
    hoarded = [keep(tensors, "hoarder") for _ in range(ROOM)]
    others = [keep(tensors, "other") for _ in range(ROOM // 2)]
    assert [is_there(tensors, ticket, "hoarder") for ticket in hoarded] == [False] * (ROOM // 2) + [True] * (ROOM // 2)
    assert all(is_there(tensors, ticket, "other") for ticket in others)
    for client in ("hoarder", "other"):
        with pytest.raises(OverloadedError):
            keep(tensors, client)
    assert tensors.evicted == ROOM // 2


def test_a_client_that_lost_transfers_takes_nothing_from_others(tensors: AheadTensors, arena: Arena) -> None:
    hoarded = [keep(tensors, "hoarder") for _ in range(ROOM)]
    arena.limit("slow")
    with pytest.raises(OverloadedError):
        keep(tensors, "slow")
    assert all(is_there(tensors, ticket, "hoarder") for ticket in hoarded)


def test_small_tensors_are_bounded_in_number(tensors: AheadTensors) -> None:
    small = TensorHeader(np.dtype(np.float32), (1, 1), 4)
    for _ in range(ROOM):
        tensors.keep(small, tensors.allocate(4, "one"), set())
    with pytest.raises(OverloadedError):
        tensors.allocate(4, "one")


def test_requests_that_wait_evict_until_they_fit(tensors: AheadTensors, arena: Arena) -> None:
    tickets = [keep(tensors) for _ in range(ROOM)]
    block = arena.allocate((ROOM + 2) * NBYTES, "other", make_room=tensors.evict)
    assert block.nbytes == (ROOM + 2) * NBYTES
    assert any(is_there(tensors, ticket) for ticket in tickets)
    assert tensors.evicted == 2
    with pytest.raises(TimeoutError):
        arena.allocate(2 * ROOM * NBYTES, "other", deadline=0.0, make_room=tensors.evict)
    assert tensors.nbytes == 0


def test_nothing_is_sent_ahead_while_a_request_waits(tensors: AheadTensors, arena: Arena) -> None:
    block = arena.allocate((2 * ROOM - 1) * NBYTES, "other")
    waiter = threading.Thread(target=lambda: arena.free(arena.allocate(2 * NBYTES, "other")))
    waiter.start()
    while not arena.is_waited_for:
        pass
    with pytest.raises(OverloadedError):
        keep(tensors)
    arena.free(block)
    waiter.join()
    keep(tensors)


def test_what_requests_use_stays_until_the_last_of_them_has_ended(tensors: AheadTensors, arena: Arena) -> None:
    tickets: ConnectionTickets = set()
    ticket = keep(tensors, tickets=tickets)

    def hold() -> AheadTensor:
        return tensors.hold("x", ticket, "one", HEADER.dtype, HEADER.shape)

    tensors.release(hold())
    assert is_there(tensors, ticket)
    held = [hold(), hold()]
    assert not tensors.evict()
    tensors.end(tickets)
    assert not is_there(tensors, ticket)
    for each in held:
        assert arena.used_bytes == NBYTES
        tensors.release(each)
    assert arena.used_bytes == tensors.nbytes == 0


@pytest.mark.parametrize("nbytes", [4, NBYTES + 4])
def test_nothing_is_counted_once_all_is_freed(tensors: AheadTensors, nbytes: int) -> None:
    header = TensorHeader(np.dtype(np.float32), (nbytes // 4, 1), nbytes)
    tensors.free(tensors.allocate(nbytes, "one"))
    tensors.forget([tensors.keep(header, tensors.allocate(nbytes, "one"), set())], "one")
    assert tensors.nbytes == len(tensors._nbytes_of) == len(tensors._of) == 0


def test_clients_that_have_about_as_much_do_not_take_from_each_other_in_turns() -> None:
    arena = Arena(2 * 9 * NBYTES, 0)
    tensors = AheadTensors(arena)
    for client in ["one"] * 9 + ["other"] * 4:
        keep(tensors, client)
    for client in ("other", "one"):
        with pytest.raises(OverloadedError):
            keep(tensors, client)
    assert [tensors.nbytes_of(client) for client in ("one", "other")] == [5 * NBYTES, 4 * NBYTES]
    arena.close()


def test_of_several_clients_the_one_with_most_loses_a_tensor(tensors: AheadTensors) -> None:
    for client in "aaabbbbb":
        keep(tensors, client)
    keep(tensors, "c")
    assert [tensors.nbytes_of(client) // NBYTES for client in "abc"] == [3, 4, 1]


def test_a_connection_that_ends_takes_all_that_it_brought(tensors: AheadTensors, arena: Arena) -> None:
    tickets: ConnectionTickets = set()
    first, *rest = [keep(tensors, tickets=tickets) for _ in range(3)]
    other = keep(tensors)
    assert tickets == {first, *rest}
    tensors.forget([first, first, b"unknown"], "one")
    tensors.forget([other], "another")
    assert tickets == set(rest)
    tensors.end(tickets)
    assert not tickets
    assert arena.used_bytes == NBYTES
    assert is_there(tensors, other)


def test_a_client_is_limited_to_what_its_requests_leave(tensors: AheadTensors) -> None:
    tickets = [keep(tensors) for _ in range(4)]
    tensors.limit("one", 2 * NBYTES)
    assert [is_there(tensors, ticket) for ticket in tickets] == [False, False, True, True]
    tensors.limit("another", 0)
    assert tensors.nbytes == 2 * NBYTES


def test_tickets_are_of_one_client_and_one_tensor(tensors: AheadTensors) -> None:
    ticket = keep(tensors)
    assert not is_there(tensors, ticket, "another")
    with pytest.raises(InvalidArgumentError) as raised:
        tensors.check("x", ticket, "one", HEADER.dtype, (NBYTES // 8, 2))
    (violation,) = raised.value.violations
    assert violation.field == "x"
    assert "must have shape (8192, 2) of float32, not (16384, 1) of float32" in violation.description
    with pytest.raises(InvalidArgumentError, match=r"must have shape .* of float16, not .* of float32"):
        tensors.check("x", ticket, "one", np.dtype(np.float16), HEADER.shape)
