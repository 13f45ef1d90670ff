"""A blocking socket with a receive buffer for frame headers and small payloads."""

from __future__ import annotations

import errno
import math
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from bngrad_wire import keepalive
from bngrad_wire.fields import Buffer
from bngrad_wire.http2.errors import EndOfConnectionError, PeerGoneError, PeerLostError
from bngrad_wire.http2.sockets.patience import Patience
from bngrad_wire.http2.sockets.receive_buffer import ReceiveBuffer
from bngrad_wire.http2.sockets.timeouts import set_timeout
from bngrad_wire.http2.sockets.tls import DONT_WAIT, TlsSocket
from bngrad_wire.http2.sockets.zero_copy import ZeroCopySender

_DIRECT_NBYTES = 16 * 1024
"""From this size on, bypassing the buffer is cheaper than copying out of it."""
_PIECES_PER_SEND = 64
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
"""A plain number, since to combine a member of an enumeration with another takes most of a microsecond."""
_UNIX_SOCKET_NBYTES = 256 * 1024
"""How much may be on its way: little enough to be in the cache still when it is read."""
_UNPACED = b"reno"
"""A congestion control that every Linux allows, and that does not make the sender wait."""


class BufferedSocket(ReceiveBuffer, Patience):
    """Sends pieces without joining them, and reads large payloads without copying them.

    Attributes:
        is_lost: Called at the end of each timeout with the seconds that a wait has taken so far; ends the wait with
            `PeerLostError` if it returns True. None if nothing knows that.
        tls: The socket, if it speaks TLS: it may then hold received data although its descriptor is not readable.
        has_lent: Whether the socket may still refer to memory that was sent; the caller resets it once the peer has
            read everything.
    """

    def __init__(self, sock: socket.socket) -> None:
        ReceiveBuffer.__init__(self)
        Patience.__init__(self)
        self._is_within_host = True
        if sock.family in {socket.AF_INET, socket.AF_INET6}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._is_within_host = _is_within_host(sock)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SOCKET_NBYTES)
        self._sock = sock
        self._timeout_s: float | None = math.nan  # not known yet
        self._is_kept_alive = False
        self.tls = sock if isinstance(sock, TlsSocket) else None
        if self.tls is not None:
            self.tls.set_timeout(sock.gettimeout())
        self._expects_large_messages = False
        self._zero_copy: ZeroCopySender | None = None
        self._may_lend = False
        self.has_lent = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.is_lost: Callable[[float], bool] | None = None

    def close(self, final_frame: bytes = b"") -> None:
        """Closes the socket; sends ``final_frame`` first if that does not block."""
        if final_frame and self.broken is None:
            with suppress(OSError):
                self._sock.settimeout(0)
                self._sock.sendmsg([final_frame], [], DONT_WAIT | _NO_SIGNAL)
        self.broken = self.broken or "it was closed"
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # A forked child may hold the socket too.
        self._sock.close()
        if self._zero_copy is not None:
            self._zero_copy.close()
        self.low = self.high
        self.shrink()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Does as `set_timeout`, but only where the timeout was another; nothing else may set the socket's."""
        if timeout_s != self._timeout_s:
            set_timeout(self._sock, timeout_s)
            self._timeout_s = timeout_s

    def keep_alive(self) -> None:
        """Has waits for a TCP socket end with `PeerLostError` soon after the peer's host has gone."""
        if self._sock.family in {socket.AF_INET, socket.AF_INET6}:
            keepalive.enable(self._sock)
            self._is_kept_alive = True

    def expect_large_messages(self, *, are_kept: bool) -> None:
        """Prepares to send large messages to a peer on this host.

        It ends the pauses between packets that BBR, the choice of many hosts, makes on the way there. With them, 100 MB
        take 1.7 times as long, but 100 KB less time, so it is not done at once.

        Args:
            are_kept: Whether what is sent from now on stays as it is until the peer has read it: then large pieces are
                not copied.
        """
        self._may_lend = are_kept
        if self._is_within_host and not self._expects_large_messages:
            self._expects_large_messages = True
            if self.tls is None:
                self._zero_copy = ZeroCopySender(self._sock)
            with suppress(OSError):  # a Unix socket has none
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)

    def send(self, pieces: list[Buffer], *, blocking: bool = True) -> bytes:
        """Sends all pieces, in as few system calls as the socket allows; modifies the list.

        Args:
            pieces: What to send.
            blocking: Whether to wait until all of it is sent. If not, the timeout must be that of `set_timeout`.

        Returns:
            What is still to be sent; empty if blocking.

        Raises:
            PeerGoneError: The peer has closed or reset the connection.
            TimeoutError: The socket's timeout passed, or `deadline`; the socket is then unusable.
        """
        self.check()
        flags = 0 if blocking else DONT_WAIT
        waits = self.waits if blocking else 1
        try:
            first = waited = 0
            while first < len(pieces):
                try:
                    sent = self._send_some(pieces[first : first + _PIECES_PER_SEND], flags)
                except (TimeoutError, BlockingIOError) as error:
                    waited += 1
                    self._check_peer(error, waited if blocking else 0)
                    if waited == waits or time.monotonic() > self.deadline:
                        raise
                    continue
                waited = 0
                self.moved += sent
                if not first and sent == sum(map(len, pieces)):
                    break
                while first < len(pieces) and sent >= len(pieces[first]):
                    sent -= len(pieces[first])
                    first += 1
                if sent:
                    pieces[first] = memoryview(pieces[first])[sent:]
                if first < len(pieces) and time.monotonic() > self.deadline:
                    raise TimeoutError
        except (TimeoutError, BlockingIOError) as error:
            if not blocking:
                return b"".join(pieces[first:])
            self.broken = "sending timed out"
            raise TimeoutError(self.broken) from error
        except PeerLostError:
            raise
        except OSError as error:
            raise self._failure("sending", error) from error
        except BaseException:
            self.broken = "sending was interrupted"
            raise
        return b""

    def _send_some(self, pieces: list[Buffer], flags: int) -> int:
        """Sends what the socket takes at once, and returns how many bytes."""
        # With a timeout of Python's own the system does not wait, so Python has to.
        if self._zero_copy is None or not self._may_lend or flags or self._sock.gettimeout() is not None:
            return self._sock.sendmsg(pieces, [], flags | _NO_SIGNAL)
        if self._zero_copy.takes(pieces[0]):
            sent, is_lent = self._zero_copy.send(pieces[0], more=len(pieces) > 1)
            self.has_lent |= is_lent
            return sent
        copied = 1
        while copied < len(pieces) and not self._zero_copy.takes(pieces[copied]):
            copied += 1
        more = socket.MSG_MORE if copied < len(pieces) else 0
        return self._sock.sendmsg(pieces[:copied], [], more | _NO_SIGNAL)

    def _receive(self, target: memoryview, flags: int = 0) -> int:
        """Receives something within `waits` timeouts; with `DONT_WAIT`, only what is there."""
        waits, waited = 1 if flags else self.waits, 0
        while True:
            if time.monotonic() > self.deadline:
                raise TimeoutError("receiving timed out")
            try:
                count = self._sock.recv_into(target, 0, flags)
                break
            except (TimeoutError, BlockingIOError) as error:
                waited += 1
                self._check_peer(error, 0 if flags else waited)
                if waited >= waits:
                    raise TimeoutError("receiving timed out") from error
            except OSError as error:
                raise self._failure("receiving", error) from error
        if not count:
            self.broken = "the peer closed the connection"
            raise PeerGoneError(self.broken)
        self.moved += count
        return count

    def _check_peer(self, error: OSError, waited: int) -> None:
        """Raises `PeerLostError` if the peer or its host has gone; looks for itself only after ``waited`` timeouts."""
        if error.errno == errno.ETIMEDOUT:  # the system's word, not a timeout of the socket
            raise self._failure("waiting", error) from error
        if not waited:
            return
        lost = ""
        if self._is_kept_alive and keepalive.is_lost(self._sock):
            lost = "the peer's host does not answer"
        elif self.is_lost is not None and self.is_lost(waited * (self._timeout_s or 0.0)):
            lost = "the peer does not answer"
        if lost:
            raise self._failure("waiting", OSError(errno.ETIMEDOUT, lost)) from error

    def _failure(self, action: str, error: OSError) -> PeerGoneError:
        self.broken = f"{action} failed: {error}"
        return (PeerLostError if error.errno in keepalive.LOST_ERRNOS else PeerGoneError)(self.broken)

    def _receive_more(self, flags: int = 0) -> None:
        self._make_room()
        self.high += self._receive(self._view[self.high :], flags)

    def fill(self, nbytes: int) -> None:
        """Waits until ``nbytes``, at most `BUFFER_NBYTES`, are buffered; a timeout loses nothing.

        Raises:
            PeerGoneError: The peer has closed or reset the connection.
            TimeoutError: The socket's timeout passed.
        """
        while self.high - self.low < nbytes:
            self._receive_more()

    def fill_or_end(self, nbytes: int) -> None:
        """Does as `fill`, but raises `EndOfConnectionError` if the connection ends while nothing is buffered."""
        while self.high - self.low < nbytes:
            try:
                self._receive_more()
            except PeerGoneError as error:
                if self.low == self.high and error.__cause__ is None:
                    raise EndOfConnectionError(self.broken) from None
                raise

    @property
    def may_have_input(self) -> bool:
        """Whether something is buffered or has arrived, or, with TLS, may have; to receive nothing takes longer."""
        return self.high > self.low or (self.tls is not None and self.tls.pending() > 0) or bool(self._poll.poll(0))

    def fill_nonblocking(self) -> bool:
        """Buffers what has arrived, without waiting; returns False if nothing has, or if there is no room.

        Raises:
            PeerGoneError: The peer has closed or reset the connection.
        """
        self.check()
        if self.high - self.low == len(self.buffer):
            return False
        if not self._may_receive_nonblocking():
            return False
        try:
            self._receive_more(DONT_WAIT)
        except TimeoutError:
            return False
        return True

    def _may_receive_nonblocking(self) -> bool:
        """With a timeout of Python's own it waits whatever the flags say, except with TLS: then it has to be asked."""
        return self.tls is not None or self._sock.gettimeout() is None or bool(self._poll.poll(0))

    def take(self, nbytes: int) -> bytes:
        """Waits for the next ``nbytes``, at most `BUFFER_NBYTES`, and returns them."""
        if self.high - self.low < nbytes:
            self.fill(nbytes)
        low = self.low
        self.low = high = low + nbytes
        return bytes(self._view[low:high])

    def read_into(self, target: memoryview) -> int:
        """Fills the start of ``target`` with one system call at most; returns the count, which is not zero."""
        wanted = len(target)
        if self.low == self.high:
            if wanted >= _DIRECT_NBYTES:
                return self._receive(target)
            self.fill(1)
        low = self.low
        count = min(wanted, self.high - low)
        target[:count] = self._view[low : low + count]
        self.low = low + count
        return count

    def read_available_into(self, target: memoryview) -> int:
        """Does as `read_into`, but does not wait: returns zero if nothing has arrived."""
        if self.low < self.high:
            return self.read_into(target)
        if not self._may_receive_nonblocking():
            return 0
        try:
            return self._receive(target, DONT_WAIT)
        except TimeoutError:
            return 0

    def skip(self, nbytes: int) -> int:
        """Discards up to ``nbytes`` with one system call at most; returns the count, which is not zero."""
        self.fill(1)
        count = min(nbytes, self.high - self.low)
        self.low += count
        return count


def _is_within_host(sock: socket.socket) -> bool:
    """Whether a TCP connection has both ends at one address."""
    try:
        return bool(sock.getpeername()[0] == sock.getsockname()[0])
    except OSError:  # the peer has gone
        return False
