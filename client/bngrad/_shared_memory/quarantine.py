"""Shared memory that a server may still write after its call has failed."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from bngrad._deadline import Cancellation, Deadline
from bngrad._shared_memory.region import PoolRegion
from bngrad.typing import Array
from bngrad_wire.http2 import frames

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.1
_PING = frames.frame(frames.PING, 0, 0, bytes(8))


class AbandonedCall:
    """Keeps the Unix socket of a call that the client gave up, until the server has closed its end.

    A slow server may not have read the call yet, and would start it later. Once it has closed its end, it has either
    started the call or never will.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._is_told = False

    def begin(self, sock: socket.socket) -> None:
        """Notes the call's connection, before the call is sent: Ctrl-C may keep `abandon` from being called."""
        self._socket = sock

    def end(self) -> None:
        """Forgets the connection: the call is over, and other calls may use that."""
        self._socket = None

    def abandon(self, sock: socket.socket) -> None:
        """Takes over the call's connection, and makes the server close its end."""
        self._socket = sock
        with suppress(OSError):  # perhaps it was closed, since the server broke the protocol
            sock.setblocking(False)
            if _is_read_shut_down(sock):
                sock.send(_PING, socket.MSG_NOSIGNAL)  # the server's PING ACK fails, so it sees the disconnect
            else:
                sock.shutdown(socket.SHUT_WR)
        self._is_told = True

    def is_over(self) -> bool:
        """Returns whether the server has closed its end, or there is no connection left."""
        if self._socket is None or self._socket.fileno() < 0:
            return True
        if not self._is_told:
            self.abandon(self._socket)
        poll = select.poll()
        poll.register(self._socket, 0)  # POLLHUP is always reported: both directions have ended
        if not poll.poll(0):
            return False
        self.close()
        return True

    def close(self) -> None:
        """Closes the connection without waiting for the server."""
        if self._socket is not None:
            self._socket.close()


def stop_reading(sock: socket.socket) -> None:
    """Ends the wait for an answer on a Unix socket, from any thread; `AbandonedCall.abandon` tells the server."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RD)


def _is_read_shut_down(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return any(events & select.POLLRDHUP for _, events in poll.poll(0))


@dataclass(slots=True, eq=False)
class Output:
    """An output of a call, its region, which the call holds, and the call's connection."""

    array: Array
    region: PoolRegion
    call: AbandonedCall

    def release(self) -> None:
        """Releases the region, and closes the connection."""
        self.region.close()
        self.call.close()


class Quarantine:
    """Quarantines output buffers of failed calls until no worker can write to them.

    Attributes:
        outputs: Those in quarantine, whose regions it releases. A call that fails extends the list itself, and calls
            `extended` then: Ctrl-C could come as a method of ours begins, and keep an output out of quarantine.
    """

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self._mutex = threading.Lock()
        self._closed = False

    @property
    def is_empty(self) -> bool:
        """Whether no output is in quarantine."""
        return not self.outputs

    def extended(self) -> None:
        """Keeps nothing once it was closed."""
        if self._closed:
            self.close()

    def release(self, arrays: Sequence[Array]) -> Array | None:
        """Releases the outputs that servers have finished with.

        Returns:
            The first of the arrays that shares memory with an output still in quarantine.
        """
        if self.is_empty:
            return None
        with self._mutex:
            over = [output for output in tuple(self.outputs) if output.call.is_over()]
            # Only after that: the region of a call that the server has not started is not in use yet.
            in_use = {region: region.is_in_use() for region in {output.region for output in over}}
            for output in over:
                if not in_use[output.region]:
                    self.outputs.remove(output)  # first, or Ctrl-C could have its region released twice
                    output.region.close()
            kept = [output.array for output in self.outputs]
        return next((array for array in arrays for each in kept if np.may_share_memory(array, each)), None)

    def wait(self, arrays: Sequence[Array], deadline: Deadline, cancellation: Cancellation) -> bool:
        """Waits until none of the arrays is in quarantine, and returns whether that came in time."""
        poll_s = _FIRST_POLL_S
        while self.release(arrays) is not None:
            if cancellation.cancelled or not deadline.allows(poll_s):
                return False
            cancellation.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        return True

    def close(self) -> None:
        """Ends the leases; arrays keep the memory itself."""
        with self._mutex:
            self._closed = True
            while self.outputs:
                self.outputs.pop().release()
