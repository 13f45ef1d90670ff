"""TLS for connections, with Python's ``ssl``.

Every 16 KiB cost a record and a call of OpenSSL. From 3.12 on, Python can leave TLS to Linux; that was not tried.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from typing import Any

from bngrad_wire.http2.sockets import sigpipe

DONT_WAIT = int(socket.MSG_DONTWAIT)
"""As a plain number: operators of the flags' own type take microseconds, for each record."""
_RECORD_NBYTES = 16 * 1024
_NEARLY_FULL_NBYTES = 15 * 1024
"""After a record of this size another is likely, so to try for one costs less than to ask; gRPC's hold 16,284 bytes."""
_TURN_NBYTES = 2**20
"""`TlsSocket` sends and receives about this much at once, so that its caller sees a slow peer's progress."""
_LONGEST_S = 1e6
"""A longer wait is not bounded: a poll takes no such timeout."""
ALPN = "h2"


def prepare(context: ssl.SSLContext) -> None:
    """Sets a context up for gRPC: HTTP/2 by ALPN, TLS 1.2 and above, sockets of class `TlsSocket`."""
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([ALPN])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION


class TlsSocket(ssl.SSLSocket):
    """A TLS socket with the methods and flags of a plain one that connections use.

    From `set_timeout` on it never blocks within OpenSSL, but waits by itself: Python's timeouts cost each record one
    more system call, and OpenSSL does not end a wait when a timeout of the system passes.
    """

    _timeout_s: float | None = None
    _input: select.poll | None = None
    _has_filled = False

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bounds the time for which `sendmsg` and `recv_into` wait, in seconds; None for no bound."""
        self._timeout_s = timeout_s
        if self.gettimeout() != 0:
            self.setblocking(False)

    def sendmsg(  # type: ignore[override]  # ssl's own raises, whatever it is given
        self, buffers: Iterable[Any], ancdata: Iterable[Any] = (), flags: int = 0
    ) -> int:
        """Sends pieces one after the other, and returns the count of bytes; the one flag heeded is `DONT_WAIT`.

        Like that of a plain socket, it may send a part of them.
        """
        sent, until = 0, self._until(flags)
        pieces = _pieces(buffers)
        piece = next(pieces, None)
        with sigpipe.held_back():
            while piece is not None and sent < _TURN_NBYTES:
                try:
                    count = self.send(piece)
                except OSError as error:
                    if sent:
                        break
                    self._wait_for_more(error, until)
                    continue
                sent += count
                piece = piece[count:] if count < len(piece) else next(pieces, None)
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives the records that have arrived, as far as the buffer has room; the one flag heeded is `DONT_WAIT`.

        Without it, a short record is the last that is received: most messages end with one, and to ask for more
        releases the GIL, for which the thread then waits.
        """
        view, received, wanted = memoryview(buffer), 0, min(len(buffer), _TURN_NBYTES)
        until = self._until(flags)
        if until and not self.pending():
            self._wait(select.POLLIN, until)
        while received < wanted:
            try:
                count: int = self.read(wanted - received, view[received:])  # type: ignore[assignment]
            except OSError as error:
                if received:  # a connection that has failed fails again
                    break
                self._wait_for_more(error, until)
                continue
            received += count
            if not count or (count < _NEARLY_FULL_NBYTES and (until or not self._has_input())):
                break
        self._has_filled = received == wanted
        return received

    def pending(self) -> int:
        """How much of a record `recv_into` left in OpenSSL, for want of room; to ask OpenSSL releases the GIL."""
        return super().pending() if self._has_filled else 0

    def _has_input(self) -> bool:
        """Whether anything has arrived that OpenSSL has not read yet."""
        if self._input is None:
            self._input = select.poll()
            self._input.register(self, select.POLLIN)
        return bool(self._input.poll(0))

    def _until(self, flags: int) -> float:
        """Returns until when to wait, on the monotonic clock; 0 not to wait."""
        if flags & DONT_WAIT:
            return 0.0
        return math.inf if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _wait_for_more(self, error: OSError, until: float) -> None:
        """Waits for what OpenSSL wants; raises any other error, and BlockingIOError if it is not to wait."""
        if not isinstance(error, (ssl.SSLWantReadError, ssl.SSLWantWriteError)):
            raise error
        if not until:
            raise BlockingIOError from error
        self._wait(select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT, until)

    def _wait(self, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(self, event)
        remaining_s = until - time.monotonic()
        if not poll.poll(None if remaining_s > _LONGEST_S else max(1e3 * remaining_s, 0)):
            raise TimeoutError("timed out")

    def shutdown(self, how: int) -> None:
        """Shuts the connection down, from any thread; other threads get errors, and never send in the clear."""
        socket.socket.shutdown(self, how)


def _pieces(buffers: Iterable[Any]) -> Iterator[memoryview]:
    """Yields the contents of buffers anew, such that each record is full but the last; copies little of large ones."""
    begun = bytearray()
    for buffer in buffers:
        rest = memoryview(buffer)
        if begun:
            room = _RECORD_NBYTES - len(begun)
            begun += rest[:room]
            rest = rest[room:]
            if len(begun) < _RECORD_NBYTES:
                continue
            yield memoryview(begun)
            begun = bytearray()
        end = len(rest) - len(rest) % _RECORD_NBYTES
        if end:
            yield rest[:end]
        begun += rest[end:]
    if begun:
        yield memoryview(begun)
