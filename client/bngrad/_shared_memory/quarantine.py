"""Shared memory that a server may still write after its call has failed."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

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


class _Entry(NamedTuple):
    output: Array
    region: PoolRegion
    call: AbandonedCall

    def release(self) -> None:
        self.region.close()
        self.call.close()


class Quarantine:
    """Quarantines output buffers of failed calls until no worker can write to them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._entries: list[_Entry] = []
        self._closed = False

    @property
    def is_empty(self) -> bool:
        """Whether no output is in quarantine."""
        return not self._entries

    def add(self, output: Array, region: PoolRegion, call: AbandonedCall) -> None:
        """Quarantines an output of a call that failed; releases its region, which the caller has held."""
        entry = _Entry(output, region, call)
        with self._mutex:
            if self._closed:
                entry.release()
            else:
                self._entries.append(entry)

    def release(self, arrays: Sequence[Array]) -> Array | None:
        """Releases the outputs that servers have finished with.

        Returns:
            The first of the arrays that shares memory with an output still in quarantine.
        """
        if self.is_empty:
            return None
        with self._mutex:
            over: list[_Entry] = []
            pending: list[_Entry] = []
            for entry in self._entries:
                (over if entry.call.is_over() else pending).append(entry)
            # Only after that: the region of a call that the server has not started is not in use yet.
            in_use = {region: region.is_in_use() for region in {entry.region for entry in over}}
            # Before any region is released, or Ctrl-C could have one released twice.
            self._entries = pending + [entry for entry in over if in_use[entry.region]]
            for entry in over:
                if not in_use[entry.region]:
                    entry.region.close()
            outputs = [entry.output for entry in self._entries]
        return next((array for array in arrays for output in outputs if np.may_share_memory(array, output)), None)

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
            for entry in self._entries:
                entry.release()
            self._entries = []
