"""Leases of shared memory, which a server on this host gives on a Unix socket."""

from __future__ import annotations

import contextlib
import socket
import struct

from bngrad._cancellation import Cancellation
from bngrad._deadline import Deadline

_LEASE_TIMEOUT_S = 5.0
_KEY_NBYTES = 16
_SIZE = struct.Struct("<Q")
_LARGEST_NBYTES = 2**64 - 1


class LeaseError(Exception):
    """The server shares no memory with this client, or no more of it."""


class LeaseEndedError(LeaseError):
    """A lease has ended, perhaps before it began; new memory may get one."""


class LeaseLateError(LeaseError):
    """The call's deadline passed before the server leased the memory."""


class UnreachableError(LeaseError):
    """Nobody leases memory where the server said so: it has ended, and another one may have begun."""


def leased(
    path: str, nbytes: int, authorization: str, deadline: Deadline, cancellation: Cancellation
) -> tuple[socket.socket, bytes, int]:
    """Leases a region of a server on this host.

    Args:
        path: The socket where it leases regions.
        nbytes: The size of the region.
        authorization: Who asks, where the server wants to know.
        deadline: When to give up.
        cancellation: Where to hear that the caller has.

    Returns:
        The connection that keeps the lease, the region's key, its file descriptor.

    Raises:
        LeaseError: The server leases no memory.
        LeaseEndedError: It would not now.
        LeaseLateError: It has not until the deadline.
        UnreachableError: It does not answer.
    """
    try:
        lease = socket.socket(socket.AF_UNIX)
    except OSError as error:
        raise LeaseError(f"there is no socket to ask for memory by: {error}") from error
    try:
        with cancellation.calls(lambda: _shut_down(lease)):
            lease.settimeout(_patience_s(deadline))
            lease.connect(path)
            if cancellation.cancelled:  # perhaps before there was a connection to shut down
                raise LeaseEndedError("the call was cancelled")
            lease.sendall(_SIZE.pack(min(nbytes, _LARGEST_NBYTES)) + authorization.encode())
            lease.settimeout(_patience_s(deadline))
            answer, fds, flags, _ = socket.recv_fds(lease, 1024, 1)
        if flags & socket.MSG_CTRUNC:
            raise LeaseError("there is no file descriptor left for its memory")
        if answer == b"":
            raise LeaseEndedError("the server ended the lease without a word: it stops, or has no file left for it")
        if len(fds) != 1 or len(answer) != _KEY_NBYTES:
            raise LeaseError(answer.decode(errors="replace"))
    except OSError as error:
        lease.close()
        if isinstance(error, TimeoutError) and not deadline.allows(0):
            raise LeaseLateError("the server has not leased the memory yet") from error
        raise UnreachableError(f"the server leases no memory: {error}") from error
    except LeaseError:
        lease.close()
        raise
    lease.setblocking(False)  # from now on it is only looked at
    return lease, answer, fds[0]


def _patience_s(deadline: Deadline) -> float:
    rest_s = deadline.rest_s()
    return _LEASE_TIMEOUT_S if rest_s is None else min(rest_s, _LEASE_TIMEOUT_S)


def _shut_down(lease: socket.socket) -> None:
    with contextlib.suppress(OSError):
        lease.shutdown(socket.SHUT_RDWR)
