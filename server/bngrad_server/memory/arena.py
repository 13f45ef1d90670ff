"""Shared memory for the tensors of all requests in flight, pooled and reused.

Fresh pages cost several times more than the copy into them, so blocks are handed out lowest address first: memory that
was touched once is used for the next request.
"""

from __future__ import annotations

import os

from bngrad_server.memory.allocator import Allocator, Block
from bngrad_wire.mapped_file import MappedFile

_RESERVE_FRACTION = 16
_LEAST_RESERVE_NBYTES, _LARGEST_RESERVE_NBYTES = 4 * 2**20, 64 * 2**20


class Arena(Allocator):
    """One anonymous shared-memory file, mapped here and by every worker; it is freed with the last process.

    Attributes:
        fd: The file descriptor to pass to a worker.
        file_nbytes: The size of the file, which holds the reserve too.
        view: The mapped memory.
    """

    def __init__(self, nbytes: int, reserve_nbytes: int | None = None) -> None:
        """Adds a sixteenth as reserve, within limits, unless told how much."""
        if reserve_nbytes is None:
            least = min(nbytes, _LEAST_RESERVE_NBYTES)
            reserve_nbytes = min(max(nbytes // _RESERVE_FRACTION, least), _LARGEST_RESERVE_NBYTES)
        super().__init__(nbytes, reserve_nbytes)
        self.file_nbytes = self.nbytes + self.reserve_nbytes
        self.fd = os.memfd_create("bngrad-arena")
        os.ftruncate(self.fd, self.file_nbytes)
        self._file = MappedFile(self.fd, self.file_nbytes)
        self.view = self._file.view

    def ask_for_huge_pages(self, block: Block) -> None:
        """Has the system provide the memory of a block in huge pages, if it is large and was never used."""
        self._file.ask_for_huge_pages(block.offset, block.nbytes)

    def close(self) -> None:
        """Closes the file; the memory is freed once no process maps it."""
        os.close(self.fd)
