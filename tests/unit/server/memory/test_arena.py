from __future__ import annotations

import os

import numpy as np
import pytest

from bngrad_server.memory.arena import Arena
from bngrad_server.memory.layout import ALIGNMENT
from bngrad_wire.chunks import WholeMessages
from bngrad_wire.mapped_file import HUGE_PAGE_NBYTES, MappedFile

MIB = 2**20


def taken_nbytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_a_process_that_maps_the_file_shares_the_memory() -> None:
    arena = Arena(ALIGNMENT)
    theirs = MappedFile(arena.fd, arena.file_nbytes).view
    arena.view[:16] = np.full(4, 7, np.float32).tobytes()
    assert np.ndarray(4, np.float32, theirs).tolist() == [7] * 4
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(arena.fd)


@pytest.mark.parametrize(
    ("nbytes", "reserve"), [(MIB, MIB), (16 * MIB, 4 * MIB), (256 * MIB, 16 * MIB), (2**34, 64 * MIB)]
)
def test_small_requests_have_a_sixteenth_in_addition_within_limits(nbytes: int, reserve: int) -> None:
    arena = Arena(nbytes)
    assert (arena.nbytes, arena.file_nbytes, len(arena.view)) == (nbytes, nbytes + reserve, nbytes + reserve)
    arena.close()


def test_a_tensor_takes_memory_as_its_chunks_arrive() -> None:
    arena = Arena(64 * MIB)
    tensor = arena.view[4096 : 4096 + 32 * MIB]
    elements = np.arange(tensor.nbytes // 4, dtype=np.int32).tobytes()
    parts = iter([elements[:MIB], elements[MIB:]])
    source = arena.source_for(tensor, WholeMessages(lambda: next(parts)))
    assert source.receive_message() == MIB
    assert taken_nbytes(arena) == 0
    source.read_into(tensor[:MIB])
    assert 0 < taken_nbytes(arena) <= 2 * HUGE_PAGE_NBYTES
    assert source.receive_message() == 31 * MIB
    source.read_into(tensor[MIB:])
    assert tensor == elements
    assert taken_nbytes(arena) <= 34 * MIB
    arena.close()


def test_small_tensors_take_no_huge_pages() -> None:
    arena = Arena(64 * MIB)
    tensor = arena.view[: HUGE_PAGE_NBYTES - 4096]
    source = WholeMessages(lambda: bytes(4096))
    arena.ask_for_huge_pages(tensor)
    assert arena.source_for(tensor, source) is source
    assert taken_nbytes(arena) == 0
    arena.close()


def test_memory_is_given_back_once_no_block_is_in_use_and_can_be_taken_again() -> None:
    arena = Arena(64 * MIB)
    block, other = arena.allocate(32 * MIB, "a"), arena.allocate(4096, "b")
    tensor = arena.view[block.offset : block.offset + block.nbytes]
    arena.ask_for_huge_pages(tensor)
    tensor[:] = b"1" * len(tensor)
    arena.free(block)
    arena.give_back()
    assert taken_nbytes(arena) >= 32 * MIB
    arena.free(other)
    arena.give_back()
    assert taken_nbytes(arena) == 0
    arena.ask_for_huge_pages(tensor)
    tensor[:] = b"2" * len(tensor)
    assert tensor == b"2" * len(tensor)
    assert taken_nbytes(arena) >= 32 * MIB
    arena.close()
