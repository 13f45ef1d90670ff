"""The tensors that a worker has copied to its GPU ahead of the requests that need them."""

from __future__ import annotations

import logging
import socket
from typing import Any

import numpy as np

from bngrad_kernels.backend import Backend
from bngrad_kernels.problem import Array
from bngrad_server.workers.ipc import MAX_PACKET_NBYTES, AheadChange
from bngrad_server.workers.pinned_memory import PinnedMemory

logger = logging.getLogger(__name__)


class AheadCopies:
    """Makes the copies, and knows them by the numbers of their tensors.

    A request whose tensor has no copy here is computed from where it lies; so a copy may be late, missing or dropped.

    Attributes:
        by_number: The copies, the oldest first; one thread changes them, all slots look.
    """

    def __init__(self, memory: PinnedMemory, backend: Backend) -> None:
        """Has none yet; the tensors lie in this memory."""
        self.by_number: dict[int, Any] = {}
        self._memory = memory
        self._backend = backend

    def serve(self, sock: socket.socket) -> None:
        """Makes and drops the copies that the front process asks for, until it closes the socket."""
        while packet := sock.recv(MAX_PACKET_NBYTES):
            self.change(AheadChange.unpacked(packet))

    def change(self, change: AheadChange) -> None:
        """Makes a copy, in place of the oldest ones where the GPU has no room for more, or drops it.

        Raises:
            DeviceFailedError: This process can no longer use the device.
        """
        if not change.nbytes:
            self.by_number.pop(change.number, None)
            return
        with self._memory.using(change.memory) as memory:
            if memory is None:  # a region that busy slots have not mapped yet, or that has ended
                return
            copy = self._begin(np.frombuffer(memory, np.uint8, change.nbytes, change.offset))
            if copy is not None:
                self.by_number[change.number] = copy
                self._backend.finish_copy(copy)  # it reads the memory, which must stay until then

    def _begin(self, tensor: Array) -> Any | None:
        while True:
            try:
                return self._backend.copy_ahead(tensor)
            except MemoryError as error:
                if not self.by_number:
                    logger.debug("a tensor of %d bytes is not copied ahead: %s", tensor.nbytes, error)
                    return None
                del self.by_number[next(iter(self.by_number))]
