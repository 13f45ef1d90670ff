"""Shared memory for the tensors of all requests in flight, pooled and reused.

Fresh pages cost several times more than the copy into them, so blocks are handed out lowest address first: memory that
was touched once is used for the next request.
"""

from __future__ import annotations

import os

from bngrad_server.memory.allocator import Allocator
from bngrad_wire.chunks import MessageSource
from bngrad_wire.mapped_file import HUGE_PAGE_NBYTES, MappedFile, address_of

_RESERVE_FRACTION = 16
_ARRIVING_NBYTES = 2 * HUGE_PAGE_NBYTES
"""How much memory is taken before the bytes have arrived that fill it."""
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

    def ask_for_huge_pages(self, tensor: memoryview) -> None:
        """Has the system provide the memory of a tensor in huge pages, if it is large and was never used."""
        if tensor.nbytes >= HUGE_PAGE_NBYTES:
            self._file.ask_for_huge_pages(address_of(tensor) - self._file.address, tensor.nbytes)

    def source_for(self, tensor: memoryview, source: MessageSource) -> MessageSource:
        """Returns a source whose chunks fill a tensor, in huge pages, which take memory as the chunks arrive."""
        return source if tensor.nbytes < HUGE_PAGE_NBYTES else _ArrivingTensor(source, self._file)

    def give_back(self) -> None:
        """Returns the memory to the system if no block is in use; the next blocks take it anew."""
        with self._mutex:
            if not self._held:
                self._file.give_back()

    def close(self) -> None:
        """Closes the file; the memory is freed once no process maps it."""
        os.close(self.fd)


class _ArrivingTensor(MessageSource):
    """The messages with the chunks of a tensor, for which memory is taken piece by piece."""

    def __init__(self, source: MessageSource, file: MappedFile) -> None:
        self._source = source
        self._file = file

    def receive_message(self) -> int | None:
        return self._source.receive_message()

    def read(self, nbytes: int) -> bytes:
        return self._source.read(nbytes)

    def read_into(self, buffer: memoryview) -> None:
        offset = address_of(buffer) - self._file.address
        for start in range(0, len(buffer), _ARRIVING_NBYTES):
            piece = buffer[start : start + _ARRIVING_NBYTES]
            self._file.ask_for_huge_pages(offset + start, len(piece))
            self._source.read_into(piece)

    def took_chunk(self) -> None:
        self._source.took_chunk()
