"""Files of shared memory, mapped so that Linux can keep them in huge pages: by the server, its workers, and clients.

Huge pages are three times as fast to provide, and large gradients a sixth faster to compute in them. Linux gives shared
memory none by default; since Linux 6.1 a process may ask for them, by madvise(2) with MADV_COLLAPSE.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any

import numpy.typing as npt

HUGE_PAGE_NBYTES = 2**21
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_REMOVE, _MADV_COLLAPSE = 9, 25
_HEADER_NBYTES = object.__basicsize__
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Returns where writable memory begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def address_of_array(array: npt.NDArray[Any]) -> int:
    """Returns where an array's first element lies, ten times as fast as ``array.ctypes.data``.

    NumPy's public C structure of an array, ``PyArrayObject_fields``, begins with it, after the header of any object.
    """
    return ctypes.c_size_t.from_address(id(array) + _HEADER_NBYTES).value


class MappedFile:
    """A file of shared memory that is mapped into this process, for as long as anything refers to its memory.

    Attributes:
        view: The memory.
        address: Where it begins.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps the first ``nbytes`` of a file.

        Raises:
            OSError: The system cannot map it.
        """
        # A huge page needs an address that is a multiple of its size, which mmap(2) does not choose for shared memory.
        # So the file takes the place of a part of other memory, which unmaps both when it goes.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        place = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags)
        begin = address_of(place)
        start = -begin % HUGE_PAGE_NBYTES
        self.address = begin + start
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(self.address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != self.address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.view = memoryview(place)[start : start + nbytes]
        self._has_asked = bytearray(nbytes // HUGE_PAGE_NBYTES)  # for each huge page
        with contextlib.suppress(AttributeError, OSError):  # a kernel, or a Python, that knows no huge pages
            place.madvise(mmap.MADV_HUGEPAGE)

    def ask_for_huge_pages(self, offset: int, nbytes: int) -> None:
        """Has the system provide the huge pages that hold a piece, unless it was asked before.

        Where the system has none, or is older, the piece is provided in pages of 4 KB when it is used.
        """
        for page in range(offset // HUGE_PAGE_NBYTES, -(-(offset + nbytes) // HUGE_PAGE_NBYTES)):
            if page < len(self._has_asked) and not self._has_asked[page]:
                self._has_asked[page] = True
                start = page * HUGE_PAGE_NBYTES
                self.view[start]  # takes a page of 4 KB: the system does not replace what is not there
                _libc.madvise(self.address + start, HUGE_PAGE_NBYTES, _MADV_COLLAPSE)

    def give_back(self) -> None:
        """Returns the memory to the system, and what is in it: the file is full of zeros then."""
        self._has_asked = bytearray(len(self._has_asked))
        _libc.madvise(self.address, self.view.nbytes, _MADV_REMOVE)
