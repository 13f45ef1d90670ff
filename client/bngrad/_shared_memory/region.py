"""A region of memory of which a pool hands out blocks: the client's own, or one that a server on this host leases."""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import threading
from collections import deque
from io import FileIO

from bngrad._shared_memory.lease import shut_down
from bngrad_wire.lease_protocol import IN_USE, IS_IN_USE
from bngrad_wire.mapped_file import HUGE_PAGE_NBYTES, MappedFile, address_of

_ANSWER_TIMEOUT_S = 0.25


class PoolRegion:
    """A region of memory that is mapped into this process; blocks are cut off it one after the other.

    Attributes:
        key: The server's name for it; empty for the client's own memory.
        address: Where it begins in this process.
        nbytes: Its size.
        used: How many bytes were cut off.
    """

    def __init__(self, nbytes: int, lease: tuple[socket.socket, bytes, FileIO] | None) -> None:
        self.nbytes = nbytes
        self.used = 0
        self.key = b""
        self._socket: socket.socket | None = None
        # The last answer, or the length of the last question. A call puts it here before Python looks for Ctrl-C.
        self._last: deque[bytes | int] = deque([b""], maxlen=1)
        self._mutex = threading.Lock()
        self._holders = 1
        self._file: MappedFile | None = None
        if lease is None:
            # Private, so that a forked child cannot write into our arrays.
            private = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # not every kernel has huge pages
                private.madvise(mmap.MADV_HUGEPAGE)
            self.memory = memoryview(private)
        else:
            self._socket, self.key, file = lease
            try:
                self._file = MappedFile(file.fileno(), nbytes)
            except BaseException:
                self.close()
                raise
            finally:
                file.close()
            self.memory = self._file.view
        self.address = address_of(self.memory)

    def ask_for_huge_pages(self, offset: int, nbytes: int) -> None:
        """Has the system provide memory in huge pages, if it is large and was never used."""
        if self._file is not None and nbytes >= HUGE_PAGE_NBYTES:
            self._file.ask_for_huge_pages(offset, nbytes)

    def unmap(self) -> None:
        """Unmaps the memory, of which no array is left.

        Raises:
            BufferError: A view of it is in use.
        """
        self.memory.release()

    @property
    def is_alive(self) -> bool:
        """Whether the server still knows it."""
        if self._socket is None:
            return not self.key
        poll = select.poll()  # does not wait, also while another thread waits for an answer
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(0)

    def is_in_use(self) -> bool:
        """Asks whether a request at the server still names the region; one caller at a time."""
        if self._socket is None:
            return False
        try:
            if self._last[0] == len(IS_IN_USE):  # The late answer must not be taken for the next one.
                self._last.extend(map(self._socket.recv, [1]))
            self._socket.settimeout(_ANSWER_TIMEOUT_S)
            self._last.extend(map(self._socket.send, [IS_IN_USE], [socket.MSG_NOSIGNAL]))
            self._last.extend(map(self._socket.recv, [1]))
            return self._last[0] == IN_USE
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            return False  # The server has gone.
        finally:
            self._socket.setblocking(False)

    def hold(self) -> None:
        """Keeps the lease until `close` is called once more."""
        with self._mutex:
            self._holders += 1

    def close(self) -> None:
        """Ends the lease once each `hold` was followed by a `close`; arrays keep the memory itself."""
        with self._mutex:
            self._holders -= 1
            if self._holders <= 0 and self._socket is not None:
                shut_down(self._socket)
                self._socket.close()
                self._socket = None
