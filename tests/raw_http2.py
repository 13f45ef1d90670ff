"""A client that sends raw bytes, for what no client library does."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.rpc.servicer import SERVICE
from bngrad_wire.http2 import frames
from bngrad_wire.http2.header_block import encode
from bngrad_wire.http2.sockets.timeouts import set_timeout

PREFACE = frames.PREFACE + frames.settings({})
NBYTES = 2**18
"""The size of a tensor that is uploaded in chunks."""
TIMEOUT_S = 30.0


class RawConnection(AbstractContextManager["RawConnection"]):
    def __init__(self, address: str) -> None:
        """Connects to ``HOST:PORT`` or ``unix:PATH``."""
        self._received = bytearray()
        if address.startswith("unix:"):
            self.sock = socket.socket(socket.AF_UNIX)
            # A timeout of Python's would fail at once, instead of waiting, while the server's queue is full.
            set_timeout(self.sock, TIMEOUT_S)
            try:
                self.sock.connect(address.removeprefix("unix:"))
            except OSError:
                self.sock.close()
                raise
            self.sock.settimeout(TIMEOUT_S)
        else:
            host, _, port = address.rpartition(":")
            self.sock = socket.create_connection((host, int(port)), TIMEOUT_S)

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> bool:
        """Sends everything, unless the server has closed the connection."""
        try:
            self.sock.sendall(data)
        except OSError:
            return False
        return True

    def has_ended_call(self) -> bool:
        """Whether the server has reset or answered the first call, or closed the connection; does not wait."""
        self.sock.settimeout(0)
        try:
            while said := self.sock.recv(2**16):
                self._received += said
        except BlockingIOError:
            return any(kind == frames.RST_STREAM or self._ends(kind, flags) for kind, flags in self._frames())
        except OSError:
            return True
        finally:
            self.sock.settimeout(TIMEOUT_S)
        return True

    def _frames(self) -> Iterator[tuple[int, int]]:
        """Yields kind and flags of the frames received for the first call."""
        offset = 0
        while offset + frames.HEADER_NBYTES <= len(self._received):
            length, kind, flags, stream_id = frames.parse_header(self._received, offset)
            offset += frames.HEADER_NBYTES + length
            if stream_id == 1:
                yield kind, flags

    @staticmethod
    def _ends(kind: int, flags: int) -> bool:
        return kind in (frames.HEADERS, frames.DATA) and bool(flags & frames.END_STREAM)

    def reset(self) -> None:
        """Closes the connection, over TCP with an RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def is_closed_by_server(self) -> bool:
        """Whether the server closes the connection in time; discards what it sends before."""
        with suppress(OSError):  # it may have closed already
            self.sock.shutdown(socket.SHUT_WR)
        return is_closed(self.sock)


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closes a socket before its timeout; discards what it sends before."""
    try:
        while sock.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def path_of(method: str) -> str:
    return f"/{SERVICE.full_name}/{method}"


def headers(method: str, stream_id: int = 1, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    """Returns the frames that open a call of a method, or of a path."""
    path = method if method.startswith("/") else path_of(method)
    pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    block = encode([*pseudo, ("content-type", "application/grpc"), ("te", "trailers"), *extra])
    return b"".join(frames.header_block(stream_id, block, 0))


def data(payload: bytes, stream_id: int = 1, *, end: bool = False) -> bytes:
    """Returns a DATA frame; the payload may have 16 KiB."""
    return frames.frame(frames.DATA, frames.END_STREAM if end else 0, stream_id, payload)


def prefixed(message: bytes) -> bytes:
    """Returns a message with gRPC's length prefix."""
    return b"\0" + struct.pack(">I", len(message)) + message


def request(nbytes: int = 0, *, whole: bool = True) -> pb.FusedBatchNormGradV2Request:
    """Returns a request whose large tensors have ``nbytes`` bytes; without the bytes unless ``whole``."""
    tensor = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=(nbytes // 256, 1, 1, 64))
    if whole:
        tensor.data = bytes(nbytes)
    stats = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=(64,), data=bytes(256))
    return pb.FusedBatchNormGradV2Request(
        y_backprop=tensor, x=tensor, scale=stats, reserve_space_1=stats, reserve_space_2=stats
    )


def upload() -> bytes:
    """Returns the start of an exchange, up to the middle of a chunk."""
    header = pb.ExchangeRequest(fused_batch_norm_grad_v2=request(NBYTES, whole=False))
    chunk = pb.ExchangeRequest(chunk=bytes(NBYTES))
    begun = prefixed(header.SerializeToString()) + prefixed(chunk.SerializeToString())[:1000]
    return PREFACE + headers("Exchange") + data(begun)


def unary_upload() -> bytes:
    """Returns the start of a unary call, up to the middle of its message."""
    return PREFACE + headers("FusedBatchNormGradV2") + data(prefixed(request(NBYTES).SerializeToString())[:1000])


def whole_call(nbytes: int, hello: bytes = PREFACE) -> bytes:
    message = prefixed(request(nbytes).SerializeToString())
    return hello + headers("FusedBatchNormGradV2") + data(message, end=True)
