"""Maps files of shared memory, in the front process and in the workers."""

from __future__ import annotations

import contextlib
import mmap


def map_file(fd: int, nbytes: int) -> mmap.mmap:
    """Maps a file, with huge pages where the system offers them."""
    mapped = mmap.mmap(fd, nbytes)
    with contextlib.suppress(AttributeError, OSError):  # a kernel, or a Python, that knows no huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
