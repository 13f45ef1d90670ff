"""The tensors that a worker has copied to its GPU ahead of the requests that need them."""

from __future__ import annotations

import logging
import socket
from typing import Any

import numpy as np

from bngrad_kernels.backend import Backend
from bngrad_server.workers.ipc import MAX_PACKET_NBYTES, AheadChange

logger = logging.getLogger(__name__)


class AheadCopies:
    """Makes the copies, and knows them by the numbers of their tensors.

    A request whose tensor has no copy here is computed from the arena; so a copy may be late, missing or dropped.

    Attributes:
        by_number: The copies, the oldest first; one thread changes them, all slots look.
    """

    def __init__(self, arena: memoryview, backend: Backend) -> None:
        """Has none yet."""
        self.by_number: dict[int, Any] = {}
        self._arena = np.frombuffer(arena, np.uint8)
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
        number, offset, nbytes = change
        if not nbytes:
            self.by_number.pop(number, None)
            return
        memory = self._arena[offset : offset + nbytes]
        while True:
            try:
                copy = self._backend.copy_ahead(memory)
            except MemoryError as error:
                if not self.by_number:
                    logger.debug("a tensor of %d bytes is not copied ahead: %s", nbytes, error)
                    return
                del self.by_number[next(iter(self.by_number))]
            else:
                if copy is not None:
                    self.by_number[number] = copy
                return
