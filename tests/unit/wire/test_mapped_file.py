from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from bngrad_wire.mapped_file import HUGE_PAGE_NBYTES, MappedFile, address_of_array

NBYTES = 4 * HUGE_PAGE_NBYTES + 4096


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("file")
    os.ftruncate(fd, NBYTES)
    yield fd
    os.close(fd)


def size_of(mapped: MappedFile, kind: str) -> int:
    """How many bytes of a file this process has in memory, of a kind that smaps(5) names."""
    smaps = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{mapped.address:x}-.*?^{kind}: +(\d+) kB", smaps, re.MULTILINE | re.DOTALL)
    assert found
    return int(found[1]) * 1024


def gives_huge_pages() -> bool:
    """Whether the system gives huge pages on request."""
    memory = mmap.mmap(-1, 2 * HUGE_PAGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = bytes(len(memory))
    try:
        memory.madvise(25)  # MADV_COLLAPSE
    except OSError:
        return False
    return True


def test_a_process_that_maps_the_file_shares_the_memory(fd: int) -> None:
    ours, theirs = MappedFile(fd, NBYTES), MappedFile(fd, NBYTES)
    ours.view[-5:] = b"there"
    assert bytes(theirs.view[-5:]) == b"there"
    assert len(theirs.view) == NBYTES


def test_the_file_is_unmapped_once_nothing_refers_to_its_memory(fd: int) -> None:
    view = MappedFile(fd, NBYTES).view
    begin = f"\n{ctypes.addressof(ctypes.c_char.from_buffer(view)):x}-"
    assert begin in Path("/proc/self/maps").read_text()
    view.release()
    assert begin not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_mapped_raises_the_error_of_the_system() -> None:
    read, write = os.pipe()
    with pytest.raises(OSError, match=os.strerror(errno.EACCES)):
        MappedFile(read, NBYTES)
    os.close(read)
    os.close(write)


def test_a_large_piece_is_in_huge_pages_for_all_who_map_it(fd: int) -> None:
    if not gives_huge_pages():
        pytest.skip("this system gives no huge pages on request: Linux does from 6.1 on")
    ours, theirs = MappedFile(fd, NBYTES), MappedFile(fd, NBYTES)
    ours.ask_for_huge_pages(HUGE_PAGE_NBYTES + 64, 2 * HUGE_PAGE_NBYTES)
    assert size_of(ours, "ShmemPmdMapped") == 3 * HUGE_PAGE_NBYTES
    theirs.view[2 * HUGE_PAGE_NBYTES] = 1
    assert size_of(theirs, "ShmemPmdMapped") == HUGE_PAGE_NBYTES


def test_pieces_keep_what_was_written_before(fd: int) -> None:
    ours, theirs = MappedFile(fd, NBYTES), MappedFile(fd, NBYTES)
    ours.view[3 * HUGE_PAGE_NBYTES :][:6] = b"before"
    theirs.ask_for_huge_pages(HUGE_PAGE_NBYTES + 1, NBYTES - HUGE_PAGE_NBYTES - 1)
    assert bytes(ours.view[3 * HUGE_PAGE_NBYTES :][:6]) == b"before"
    assert not any(ours.view[: 3 * HUGE_PAGE_NBYTES])


@pytest.mark.parametrize("constant", ["mmap.MADV_HUGEPAGE", "_MADV_COLLAPSE"])
def test_a_kernel_without_huge_pages_provides_small_ones(
    constant: str, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"bngrad_wire.mapped_file.{constant}", 1000)  # unknown to any kernel, so that it answers EINVAL
    mapped = MappedFile(fd, NBYTES)
    mapped.ask_for_huge_pages(0, NBYTES)
    mapped.view[-1] = 1
    assert bytes(mapped.view[-2:]) == b"\0\1"


def test_a_file_is_mapped_by_a_python_without_huge_pages(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert len(MappedFile(fd, NBYTES).view) == NBYTES


@pytest.mark.parametrize(
    "array", [np.empty((2, 3), ml_dtypes.bfloat16), np.frombuffer(b"read-only", np.uint8, offset=2), np.ones(4)[::-1]]
)
def test_the_address_of_an_array_is_numpys(array: npt.NDArray[Any]) -> None:
    assert address_of_array(array) == array.ctypes.data
