from __future__ import annotations

import numpy as np
import pytest

from bngrad_server.memory.arena import Arena
from bngrad_server.memory.layout import ALIGNMENT
from bngrad_wire.mapped_file import MappedFile

MIB = 2**20


def test_a_process_that_maps_the_file_shares_the_memory() -> None:
    arena = Arena(ALIGNMENT)
    theirs = MappedFile(arena.fd, arena.file_nbytes).view
    arena.view[:16] = np.full(4, 7, np.float32).tobytes()
    assert np.ndarray(4, np.float32, theirs).tolist() == [7] * 4
    arena.close()


@pytest.mark.parametrize(
    ("nbytes", "reserve"), [(MIB, MIB), (16 * MIB, 4 * MIB), (256 * MIB, 16 * MIB), (2**34, 64 * MIB)]
)
def test_small_requests_have_a_sixteenth_in_addition_within_limits(nbytes: int, reserve: int) -> None:
    arena = Arena(nbytes)
    assert (arena.nbytes, arena.file_nbytes, len(arena.view)) == (nbytes, nbytes + reserve, nbytes + reserve)
    arena.close()
