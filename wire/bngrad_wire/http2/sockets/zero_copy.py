"""Sends large memory within a host without a copy: the socket refers to its pages until the peer reads them.

So the peer sees what is written there meanwhile. A client's call ends only after the server has read all of it, and a
server waits for a sign that the client has, if the peer keeps the protocol; one that does not could later read memory
that is used for something else by then. Hence the peer must be a process of the same user, which may read this
process's memory anyway.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket

import numpy as np

from bngrad_wire.fields import Buffer
from bngrad_wire.http2.sockets import sigpipe
from bngrad_wire.http2.sockets.peers import is_own_peer
from bngrad_wire.mapped_file import address_of_array

_FROM_NBYTES = 2 * 2**20
"""Smaller pieces are sent in less time by copying them."""
_PIPE_NBYTES = 512 * 1024
"""A larger pipe is hardly faster; by default a user may have 64 MiB of pipes."""
_MAX_PIPES = 16
_UNIX_SOCKET_NBYTES = 2**20
"""The buffer of a Unix socket: with a smaller one, sender and peer wait for each other."""
_SPLICE_F_NONBLOCK, _SPLICE_F_MORE = 2, 4
_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _Pipe:
    """A pipe.

    Attributes:
        held: How many bytes are in it.
    """

    def __init__(self) -> None:
        """Opens it; raises OSError or AttributeError where the system does not allow it."""
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        self.held = 0
        try:
            fcntl.fcntl(self._write_end, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
            self.fill(b"\0")
            os.read(self._read_end, self.held)
            self.held = 0
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes both ends."""
        os.close(self._read_end)
        os.close(self._write_end)

    def fill(self, piece: Buffer) -> None:
        """Puts as much of a piece as there is room for into the pipe, after what this holds of it already."""
        if self.held == len(piece):
            return
        address = address_of_array(np.frombuffer(piece, np.uint8))
        rest = _Iovec(address + self.held, len(piece) - self.held)
        added = _libc.vmsplice(self._write_end, ctypes.byref(rest), 1, _SPLICE_F_NONBLOCK)
        if added < 0 and not self.held:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.held += max(added, 0)  # what is held goes first, then there is room, or the error again

    def empty(self, sock: socket.socket, flags: int) -> int:
        """Sends some of what it holds, and returns how many bytes."""
        sent = os.splice(self._read_end, sock.fileno(), self.held, flags=flags)
        self.held -= sent
        return sent


_spare_pipes: list[_Pipe | None] = [None] * _MAX_PIPES
"""The pipes that no socket has, which bounds their number; None for one that is not open."""


def _forget_pipes() -> None:
    """Closes what a fork inherited: it must not share its parent's pipes."""
    for pipe in _spare_pipes:
        if pipe is not None:
            pipe.close()
    _spare_pipes[:] = [None] * _MAX_PIPES


os.register_at_fork(after_in_child=_forget_pipes)


class ZeroCopySender:
    """Sends pieces to one socket, by vmsplice(2) into a pipe and splice(2) out of it."""

    def __init__(self, sock: socket.socket) -> None:
        """Opens nothing yet."""
        self._sock = sock
        self._is_possible: bool | None = None  # not known yet
        self._pipe: _Pipe | None = None  # of the piece that is being sent
        self._left = 0  # of it

    def takes(self, piece: Buffer) -> bool:
        """Whether to send a piece, or the rest of one, by `send`.

        Must be asked about large pieces only once the peer has sent something: see `is_own_peer`.
        """
        if self._left:
            return True
        if len(piece) < _FROM_NBYTES:
            return False
        if self._is_possible is None:
            self._is_possible = is_own_peer(self._sock) and self._has_room()
        return self._is_possible and (self._pipe is not None or self._take_pipe())

    def send(self, piece: Buffer, *, more: bool) -> tuple[int, bool]:
        """Sends some of a piece; the next call takes the rest of it.

        Args:
            piece: It must not change until the peer has read it.
            more: Whether more is sent immediately after the piece.

        Returns:
            How many bytes were sent, and whether the socket refers to them.

        Raises:
            OSError: As of the socket.
        """
        assert self._pipe is not None
        self._left = self._left or len(piece)
        try:
            self._pipe.fill(piece)
        except OSError:  # the memory has no pages to lend, as a device's may have none
            self.close()
            return self._sock.send(piece, socket.MSG_NOSIGNAL), False
        with sigpipe.held_back():
            sent = self._pipe.empty(self._sock, _SPLICE_F_MORE if more or self._pipe.held < len(piece) else 0)
        self._left -= sent
        if not self._left:
            pipe, self._pipe = self._pipe, None
            _spare_pipes.append(pipe)
        return sent, True

    def close(self) -> None:
        """Sends no more."""
        self._is_possible = False
        self._left = 0
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()  # amid a piece it holds some of that, also where Ctrl-C came before it was counted
            _spare_pipes.append(None)

    def _take_pipe(self) -> bool:
        try:
            spare = _spare_pipes.pop()
        except IndexError:  # other sockets have them all
            return False
        try:
            self._pipe = spare or _Pipe()
        except (AttributeError, OSError):  # a sandbox, too few descriptors, or not Linux
            self._is_possible = False
        finally:
            if self._pipe is None:
                _spare_pipes.append(None)
        return self._pipe is not None

    def _has_room(self) -> bool:
        """Enlarges a Unix socket's buffer, and returns whether the system allows it; that of TCP grows by itself."""
        if self._sock.family != socket.AF_UNIX:
            return True
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SOCKET_NBYTES)
        # Linux doubles it, for what it needs itself, if that is not above net.core.wmem_max.
        return self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * _UNIX_SOCKET_NBYTES
