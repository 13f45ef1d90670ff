from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bngrad_server.arena import ALIGNMENT, Arena, ArenaTooSmallError, Block, map_arena


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
            held.append(arena.allocate(nbytes, timeout_s=0))
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
    assert arena.allocate(arena.nbytes, timeout_s=0) == Block(0, arena.nbytes)
    arena.close()


def test_memory_that_was_touched_is_handed_out_again_first() -> None:
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


def test_waiting_for_memory_ends_with_the_timeout_and_leaves_no_trace() -> None:
    arena = Arena(ALIGNMENT)
    held = arena.allocate(1)
    with pytest.raises(TimeoutError):
        arena.allocate(1, timeout_s=0.01)
    arena.free(held)
    assert arena.allocate(1, timeout_s=0) == held


def test_the_memory_is_shared_with_whoever_maps_the_file() -> None:
    arena = Arena(ALIGNMENT)
    theirs = map_arena(arena.fd, arena.nbytes)
    np.ndarray(4, np.float32, arena.buffer)[:] = 7
    assert np.ndarray(4, np.float32, theirs).tolist() == [7] * 4
