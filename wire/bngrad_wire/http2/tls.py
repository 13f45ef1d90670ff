"""TLS for connections, with Python's ``ssl``.

Every 16 KiB cost a record and a call of OpenSSL. The kernel's TLS would avoid both, but Python does not offer it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Iterator
from typing import Any

DONT_WAIT = int(socket.MSG_DONTWAIT)
"""As a plain number: operators of the flags' own type take microseconds, for each record."""
_RECORD_NBYTES = 16 * 1024
_SEND_NBYTES = 512 * 1024
"""`TlsSocket.sendmsg` returns after about this much, so that its caller sees a slow peer's progress."""
ALPN = "h2"


def prepare(context: ssl.SSLContext) -> None:
    """Sets a context up for gRPC: HTTP/2 by ALPN, TLS 1.2 and above, sockets of class `TlsSocket`."""
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([ALPN])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION


class TlsSocket(ssl.SSLSocket):
    """A TLS socket with the methods and flags of a plain one that connections use.

    Its timeout is Python's: OpenSSL would retry when a timeout of the system passes.
    """

    def sendmsg(  # type: ignore[override]  # ssl's own raises, whatever it is given
        self, buffers: Iterable[Any], ancdata: Iterable[Any] = (), flags: int = 0
    ) -> int:
        """Sends pieces one after the other, and returns the count of bytes; the one flag heeded is `DONT_WAIT`.

        Like that of a plain socket, it may send a part of them.
        """
        sent = 0
        try:
            for piece in _pieces(buffers):
                rest = piece
                while rest:
                    if sent >= _SEND_NBYTES:
                        return sent
                    count = self._nonblocking(self.send, rest) if flags & DONT_WAIT else self.send(rest)
                    sent += count
                    rest = rest[count:]
        except (BlockingIOError, TimeoutError):
            if not sent:
                raise
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives up to a record; the one flag heeded is `DONT_WAIT`."""
        if flags & DONT_WAIT:
            return self._nonblocking(super().recv_into, buffer)
        return super().recv_into(buffer)

    def shutdown(self, how: int) -> None:
        """Shuts the connection down, from any thread; other threads get errors, and never send in the clear."""
        socket.socket.shutdown(self, how)

    def _nonblocking(self, act: Any, buffer: Any) -> int:
        timeout_s = self.gettimeout()
        self.settimeout(0)
        try:
            count: int = act(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error
        else:
            return count
        finally:
            self.settimeout(timeout_s)


def _pieces(buffers: Iterable[Any]) -> Iterator[memoryview]:
    """Yields the buffers, small ones joined: each piece becomes a record."""
    small: list[Any] = []
    nbytes = 0
    for buffer in buffers:
        if nbytes + len(buffer) > _RECORD_NBYTES and small:
            yield memoryview(b"".join(small))
            small, nbytes = [], 0
        if len(buffer) > _RECORD_NBYTES:
            yield memoryview(buffer)
        else:
            small.append(buffer)
            nbytes += len(buffer)
    if small:
        yield memoryview(b"".join(small))
