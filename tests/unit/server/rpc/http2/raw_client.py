"""A client of several calls at a time on a connection, which sends what it is told."""

from __future__ import annotations

import socket
import struct

from tests.raw_http2 import data, headers, prefixed
from tests.unit.server.rpc.http2.service import PATH, REQUEST, Service
from tests.unit.server.workers.additions import SHAPE, check_answer, inputs

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.http2 import frames

PREFACE = frames.PREFACE + frames.settings({})


class Raw:
    """A client that sends what it is told, and answers nothing by itself."""

    def __init__(self, sock: socket.socket, opening: bytes = PREFACE) -> None:
        self.sock = sock
        self._file = sock.makefile("rb")
        self._received: list[tuple[int, int, int, bytes]] = []  # kinds, flags, streams, payloads
        sock.sendall(opening)

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def send(self, *parts: bytes) -> None:
        self.sock.sendall(b"".join(parts))

    def ask(self, stream_id: int, message: bytes = REQUEST, path: str = PATH) -> None:
        self.send(headers(path, stream_id), data(prefixed(message), stream_id, end=True))

    def next(self, kind: int, stream_id: int) -> tuple[int, bytes]:
        """Flags and payload of the next frame of a kind on a stream; keeps others for later."""
        for i, (found, flags, on, payload) in enumerate(self._received):
            if (found, on) == (kind, stream_id):
                del self._received[i]
                return flags, payload
        while True:
            header = self._file.read(frames.HEADER_NBYTES)
            if len(header) < frames.HEADER_NBYTES:
                raise EOFError
            length, found, flags, on = frames.parse_header(header, 0)
            payload = self._file.read(length)
            if (found, on) == (kind, stream_id):
                return flags, payload
            self._received.append((found, flags, on, payload))

    def has_received(self, kind: int, stream_id: int) -> bool:
        """Whether a frame of a kind has come on a stream before the answer to a PING."""
        self.send(frames.frame(frames.PING, 0, 0, bytes(8)))
        self.next(frames.PING, 0)
        return any((found, on) == (kind, stream_id) for found, _, on, _ in self._received)

    def answer_ping(self) -> None:
        _, payload = self.next(frames.PING, 0)
        self.send(frames.frame(frames.PING, frames.ACK, 0, payload))

    def answer(self, stream_id: int) -> bytes:
        """The message of an answer with status OK."""
        assert not self.next(frames.HEADERS, stream_id)[0] & frames.END_STREAM
        received = b""
        while len(received) < 5 or len(received) < 5 + struct.unpack(">I", received[1:5])[0]:
            received += self.next(frames.DATA, stream_id)[1]
        assert self.status(stream_id) == 0
        return received[5:]

    def status(self, stream_id: int) -> int:
        flags, block = self.next(frames.HEADERS, stream_id)
        assert flags & frames.END_STREAM
        name = b"grpc-status"
        start = block.index(name) + len(name)
        return int(block[start + 1 :][: block[start]])

    def code(self, kind: int, stream_id: int) -> int:
        """The error code of the next frame of a kind: RST_STREAM or GOAWAY."""
        payload = self.next(kind, stream_id)[1]
        return int.from_bytes(payload[-4:] if kind == frames.RST_STREAM else payload[4:8], "big")


def raw(service: Service, opening: bytes = PREFACE) -> Raw:
    client = Raw(service.socket(), opening)
    service._opened.append(client)
    return client


def check_sum(message: bytes, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> None:
    answer = pb.FusedBatchNormGradV3Response.FromString(message)
    check_answer(answer, answer.x_backprop.data, inputs(seed, shape))


def increments(client: Raw, stream_id: int) -> int:
    """By how much the windows of a stream have grown before the answer to a PING."""
    total = 0
    while client.has_received(frames.WINDOW_UPDATE, stream_id):
        total += int.from_bytes(client.next(frames.WINDOW_UPDATE, stream_id)[1], "big")
    return total
