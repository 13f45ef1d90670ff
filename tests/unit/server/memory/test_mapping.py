from __future__ import annotations

import mmap
import os

import pytest

from bngrad_server.memory.mapping import map_file

NBYTES = 4096


@pytest.fixture
def fd() -> int:
    fd = os.memfd_create("file")
    os.ftruncate(fd, NBYTES)
    return fd


def test_a_file_is_mapped_by_a_kernel_without_huge_pages(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 1000)  # unknown to any kernel, so that it answers EINVAL
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(fd, NBYTES).madvise(mmap.MADV_HUGEPAGE)
    assert len(map_file(fd, NBYTES)) == NBYTES


def test_a_file_is_mapped_by_a_python_without_huge_pages(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert len(map_file(fd, NBYTES)) == NBYTES
