"""Leases regions of shared memory from a server on this host, by the protocol of `bngrad_wire.lease_protocol`."""

from __future__ import annotations

import contextlib
import socket
from io import FileIO

from bngrad._deadline import Cancellation, Deadline, held_back
from bngrad_wire import lease_protocol

_LEASE_TIMEOUT_S = 5.0


class LeaseError(Exception):
    """The server shares no memory with this client, or no more of it."""


class LeaseRefusedError(LeaseError):
    """The server leases no more memory now, to this client or at all."""


class LeaseEndedError(LeaseError):
    """A lease has ended, perhaps before it began; new memory may be leased."""


class LeaseLateError(LeaseError):
    """The call's deadline passed before the server leased the memory."""


class UnreachableError(LeaseError):
    """No server answers at the path that was given for leases: it has ended, and another may have started."""


def lease_region(
    path: str, nbytes: int, authorization: str, deadline: Deadline, cancellation: Cancellation
) -> tuple[socket.socket, bytes, FileIO]:
    """Leases a region of a server on this host, at the path of its Unix socket for regions.

    Returns:
        The connection that keeps the lease, the region's key, its file.

    Raises:
        LeaseRefusedError: The server refuses.
        LeaseEndedError: The server closed the connection without an answer.
        LeaseLateError: The deadline passed.
        UnreachableError: The server does not answer.
    """
    try:
        lease = socket.socket(socket.AF_UNIX)
    except OSError as error:
        raise LeaseError(f"there is no socket to ask for memory by: {error}") from error
    try:
        with cancellation.calls(lambda: shut_down(lease)):
            lease.settimeout(_timeout_s(deadline))
            lease.connect(path)
            if cancellation.cancelled:  # perhaps before there was a connection to shut down
                raise LeaseEndedError("the call was cancelled")
            lease.sendall(lease_protocol.pack_request(nbytes, authorization), socket.MSG_NOSIGNAL)
            lease.settimeout(_timeout_s(deadline))
            lease.recv(1, socket.MSG_PEEK)  # waits, where Ctrl-C can end that
            answer, files, flags = held_back(lambda: _received(lease))
        if flags & socket.MSG_CTRUNC:
            raise LeaseError("this process has no file descriptor left for the server's memory")
        if answer == b"":
            raise LeaseEndedError("the server closed the lease without an answer: it stops, or has no file left for it")
        if len(files) != 1 or len(answer) != lease_protocol.KEY_NBYTES:
            raise LeaseRefusedError(answer.decode(errors="replace"))
    except OSError as error:
        lease.close()
        if isinstance(error, TimeoutError) and not deadline.allows(0):
            raise LeaseLateError("the server has not leased the memory yet") from error
        if isinstance(error, BlockingIOError):
            raise LeaseRefusedError("too many clients wait to be leased memory") from error
        raise UnreachableError(f"the server leases no memory: {error}") from error
    except BaseException:
        lease.close()
        raise
    lease.setblocking(False)  # from now on it is only polled
    return lease, answer, files[0]


def _received(lease: socket.socket) -> tuple[bytes, list[FileIO], int]:
    """Receives the server's answer, its descriptors as files, which close themselves, and the flags of recvmsg(2)."""
    answer, fds, flags, _ = socket.recv_fds(lease, 1024, 1)
    return answer, [FileIO(fd) for fd in fds], flags


def shut_down(sock: socket.socket) -> None:
    """Ends both directions of a connection, also if a forked child holds the socket too."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _timeout_s(deadline: Deadline) -> float:
    remaining_s = deadline.remaining_s()
    return _LEASE_TIMEOUT_S if remaining_s is None else min(remaining_s, _LEASE_TIMEOUT_S)
