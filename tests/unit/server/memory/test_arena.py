from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bngrad_server.errors import ArenaTooSmallError
from bngrad_server.memory.arena import Arena, Block
from bngrad_server.memory.layout import ALIGNMENT
from bngrad_server.memory.mapping import map_file


@given(st.data())
def test_blocks_are_aligned_disjoint_and_all_memory_comes_back(data: st.DataObject) -> None:
    arena = Arena(64 * ALIGNMENT)
    held: list[Block] = []
    for _ in range(data.draw(st.integers(0, 40))):
        nbytes = data.draw(st.integers(0, 10 * ALIGNMENT))
        if data.draw(st.booleans()) and held:
            arena.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        try:
            held.append(arena.allocate(nbytes, deadline=0))
        except TimeoutError:
            continue
        assert held[-1].offset % ALIGNMENT == 0
        assert held[-1].nbytes >= nbytes
        ordered = sorted(held, key=lambda block: block.offset)
        assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(ordered))
        assert ordered[-1].offset + ordered[-1].nbytes <= arena.nbytes
    for block in held:
        arena.free(block)
    assert arena.free_bytes == arena.nbytes
    assert arena.allocate(arena.nbytes, deadline=0) == Block(0, arena.nbytes)
    arena.close()


def test_memory_that_was_touched_is_handed_out_first() -> None:
    arena = Arena(16 * ALIGNMENT)
    first = arena.allocate(ALIGNMENT)
    arena.allocate(ALIGNMENT)
    arena.free(first)
    assert arena.allocate(ALIGNMENT) == first


def test_a_request_larger_than_the_arena_is_refused_at_once() -> None:
    with pytest.raises(ArenaTooSmallError, match=r"needs 1024 bytes .* has 512"):
        Arena(512).allocate(1024)


def test_waiting_requests_get_memory_in_the_order_in_which_they_came() -> None:
    arena = Arena(4 * ALIGNMENT)
    held = arena.allocate(3 * ALIGNMENT)
    order: list[str] = []

    def take(name: str, nbytes: int) -> None:
        arena.allocate(nbytes)
        order.append(name)

    large = threading.Thread(target=take, args=("large", 2 * ALIGNMENT))
    large.start()
    while not arena._waiting:
        time.sleep(0.001)
    small = threading.Thread(target=take, args=("small", ALIGNMENT))
    small.start()
    small.join(0.05)
    assert order == []  # one unit is free, but the large request came first
    arena.free(held)
    large.join()
    small.join()
    assert sorted(order) == ["large", "small"]


@pytest.mark.parametrize(
    ("timeout_s", "is_cancelled", "error"),
    [
        (0.05, False, TimeoutError),
        (-1.0, False, TimeoutError),
        (60.0, True, CancelledError),
        (None, True, CancelledError),
    ],
)
def test_waiting_for_memory_ends_at_the_deadline_or_when_cancelled_and_leaves_no_trace(
    timeout_s: float | None, is_cancelled: bool, error: type[Exception]
) -> None:
    arena = Arena(2 * ALIGNMENT)
    held = arena.allocate(ALIGNMENT + 1)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with pytest.raises(error):
        arena.allocate(1, deadline, lambda: is_cancelled)
    assert is_cancelled or (deadline is not None and time.monotonic() >= deadline)
    arena.free(held)
    assert arena.allocate(arena.nbytes, deadline=0) == held


def test_a_caller_that_gives_up_makes_way_for_the_next_one() -> None:
    arena = Arena(2 * ALIGNMENT)
    arena.allocate(ALIGNMENT)
    gone, taken = threading.Event(), threading.Event()

    def give_up() -> None:
        with pytest.raises(CancelledError):
            arena.allocate(2 * ALIGNMENT, None, gone.is_set)

    def take() -> None:
        arena.allocate(ALIGNMENT)
        taken.set()

    threads = []
    for count, target in enumerate((give_up, take), 1):
        threads.append(threading.Thread(target=target))
        threads[-1].start()
        while len(arena._waiting) < count:
            time.sleep(0.001)
    assert not taken.is_set()
    gone.set()
    for thread in threads:
        thread.join(30)
    assert taken.is_set()


def test_free_memory_is_taken_even_after_the_deadline() -> None:
    assert Arena(ALIGNMENT).allocate(1, deadline=0, is_cancelled=lambda: True) == Block(0, ALIGNMENT)


def test_a_process_that_maps_the_file_shares_the_memory() -> None:
    arena = Arena(ALIGNMENT)
    theirs = map_file(arena.fd, arena.nbytes)
    arena.view[:16] = np.full(4, 7, np.float32).tobytes()
    assert np.ndarray(4, np.float32, theirs).tolist() == [7] * 4
