"""TLS beneath a connection, by Python's own ``ssl``.

A context makes sockets of this kind where its ``sslsocket_class`` is `TlsSocket`. Every 16 KiB cost a record and a call
of OpenSSL; the kernel's own TLS, which would spare both, is not to be had from Python.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Iterator
from typing import Any

_RECORD_NBYTES = 16 * 1024
ALPN = "h2"


def prepare(context: ssl.SSLContext) -> None:
    """Makes a context fit for gRPC: HTTP/2, TLS 1.2 and above, sockets that connections can use."""
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([ALPN])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION


class TlsSocket(ssl.SSLSocket):
    """A TLS socket that can do what connections ask of a plain one.

    Its timeout is Python's own: OpenSSL would take the system's for a reason to try again.
    """

    def sendmsg(  # type: ignore[override]  # ssl's own raises, whatever it is given
        self, buffers: Iterable[Any], ancdata: Iterable[Any] = (), flags: int = 0
    ) -> int:
        """Sends pieces one after the other, and gives the count of bytes; of the flags, MSG_DONTWAIT counts."""
        sent = 0
        try:
            for piece in _pieces(buffers):
                rest = piece
                while rest:
                    count = self._nonblocking(self.send, rest) if flags & socket.MSG_DONTWAIT else self.send(rest)
                    sent += count
                    rest = rest[count:]
        except (BlockingIOError, TimeoutError):
            if not sent:
                raise
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receives up to a record; of the flags, MSG_DONTWAIT counts."""
        if flags & socket.MSG_DONTWAIT:
            return self._nonblocking(super().recv_into, buffer)
        return super().recv_into(buffer)

    def shutdown(self, how: int) -> None:
        """Ends the connection, from any thread; whoever uses it finds it broken, and never in the clear."""
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
    """The buffers, of which small ones are joined, since each piece is a record."""
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
