"""Raw HTTP/2 connections of attackers, and what they send."""

from __future__ import annotations

import math
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from benchmarks.hostile.victim import TIMEOUT_S, Victim

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.http2 import frames
from bngrad_wire.http2.header_block import encode

UNARY = "/bngrad.v1.BatchNormGradService/FusedBatchNormGradV2"
EXCHANGE = "/bngrad.v1.BatchNormGradService/Exchange"
CREDIT = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}) + frames.window_update(
    0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW
)  # fmt: skip
"""Begins a connection on which the server may send as much as it likes."""
NO_CREDIT = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
"""Begins a connection on which the server may send no message."""
PLAIN = frames.PREFACE + frames.settings({})

_RETRY_S = 0.02


def headers(
    stream: int, path: str = UNARY, token: str | None = None, extra: tuple[tuple[str, str], ...] = (), flags: int = 0
) -> bytes:
    """Returns the frames that open a call, without a token if there is none."""
    return b"".join(frames.header_block(stream, header_block(path, token, extra), flags))


def header_block(path: str = UNARY, token: str | None = None, extra: tuple[tuple[str, str], ...] = ()) -> bytes:
    authorization = (("authorization", f"Bearer {token}"),) if token else ()
    return encode([
        (":method", "POST"), (":scheme", "https"), (":path", path), (":authority", "localhost"),
        ("content-type", "application/grpc"), ("te", "trailers"), *authorization, *extra,
    ])  # fmt: skip


def prefixed(message: bytes) -> bytes:
    """Returns a message with gRPC's length prefix."""
    return struct.pack(">BI", 0, len(message)) + message


def request(nbytes: int, *, whole: bool = True) -> pb.FusedBatchNormGradV2Request:
    """Returns a request whose two large tensors have ``nbytes`` bytes, which they lack unless ``whole``."""
    tensor = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=(nbytes // 256, 1, 1, 64), data=bytes(nbytes * whole))
    stats = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=(64,), data=bytes(256))
    return pb.FusedBatchNormGradV2Request(
        y_backprop=tensor, x=tensor, scale=stats, reserve_space_1=stats, reserve_space_2=stats
    )


def unary_message(nbytes: int) -> bytes:
    return prefixed(request(nbytes).SerializeToString())


def exchange_header(nbytes: int) -> bytes:
    """Returns the message that begins an exchange and announces tensors of ``nbytes`` bytes."""
    return prefixed(pb.ExchangeRequest(fused_batch_norm_grad_v2=request(nbytes, whole=False)).SerializeToString())


def chunk(nbytes: int) -> bytes:
    return prefixed(pb.ExchangeRequest(chunk=bytes(nbytes)).SerializeToString())


class Peer:
    """A raw HTTP/2 connection that keeps to the server's windows, and otherwise to no rule.

    It understands only as much as it needs: what the server sends beside windows and ends of calls is dropped.

    Attributes:
        sock: Its socket.
        ended: The streams that the server has ended.
    """

    def __init__(self, victim: Victim, greeting: bytes = PLAIN) -> None:
        self.sock = victim.connect()
        self.ended: set[int] = set()
        self._received = bytearray()
        self._initial = self._window = frames.DEFAULT_WINDOW
        self._windows: dict[int, int] = {}
        self.sock.sendall(greeting)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def upload(self, stream: int, payload: bytes, *, end: bool = False) -> None:
        """Sends DATA frames as fast as the server's windows allow; stops if the server ends the call.

        Raises:
            OSError: The connection has ended, or the server gave no window for `TIMEOUT_S`.
        """
        view = memoryview(payload)
        self.poll()
        while view and stream not in self.ended:
            room = min(self._window, self._windows.get(stream, 0) + self._initial, frames.MIN_FRAME_SIZE * 16)
            if room <= 0:
                self._receive()
                continue
            part, view = view[:room], view[room:]
            self._window -= len(part)
            self._windows[stream] = self._windows.get(stream, 0) - len(part)
            pieces = []
            for start in range(0, len(part), frames.MIN_FRAME_SIZE):
                piece = bytes(part[start : start + frames.MIN_FRAME_SIZE])
                is_last = end and not view and start + len(piece) == len(part)
                pieces.append(frames.frame(frames.DATA, frames.END_STREAM * is_last, stream, piece))
            self.sock.sendall(b"".join(pieces))
            self.poll()

    def wait_for_end(self, stream: int, timeout_s: float | None = None) -> None:
        """Waits until the server has ended a call; raises OSError if the connection ends before, or the time is up."""
        self.sock.settimeout(timeout_s)
        try:
            while stream not in self.ended:
                self._receive()
        finally:
            self.sock.settimeout(TIMEOUT_S)

    def poll(self) -> None:
        """Takes in what the server has sent; raises OSError if the connection has ended."""
        self.sock.settimeout(0)
        try:
            while True:
                self._receive()
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        finally:
            self.sock.settimeout(TIMEOUT_S)

    def _receive(self) -> None:
        said = self.sock.recv(2**18)
        if not said:
            raise ConnectionError("the server has closed the connection")
        self._received += said
        offset = 0
        while len(self._received) - offset >= frames.HEADER_NBYTES:
            length, kind, flags, stream = frames.parse_header(self._received, offset)
            start = offset + frames.HEADER_NBYTES
            if len(self._received) < start + length:
                break
            offset = start + length
            if kind not in (frames.DATA, frames.PING):
                self._take(kind, flags, stream, bytes(self._received[start:offset]))
        del self._received[:offset]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.SETTINGS:
            for key, value in frames.SETTING.iter_unpack(payload):
                self._initial = value if key == frames.INITIAL_WINDOW_SIZE else self._initial
        elif kind == frames.WINDOW_UPDATE:
            (increment,) = frames.UINT32.unpack(payload)
            if stream:
                self._windows[stream] = self._windows.get(stream, 0) + increment
            else:
                self._window += increment
        elif kind == frames.RST_STREAM or (kind == frames.HEADERS and flags & frames.END_STREAM):
            self.ended.add(stream)
            self._windows.pop(stream, None)


def repeatedly(attack: Callable[[], object]) -> None:
    """Attacks again and again; the server may end the connection."""
    while True:
        with suppress(OSError):
            attack()
        time.sleep(_RETRY_S)


def in_threads(count: int, attack: Callable[[int], object]) -> None:
    """Attacks again and again in several threads; each gets its number."""
    threads = [
        threading.Thread(target=repeatedly, args=(lambda number=number: attack(number),), daemon=True)
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    threads[0].join()


def with_crowd(count: int, begin: Callable[[], Any], step: Callable[[Any], object], pause_s: float) -> None:
    """Keeps several connections open and takes a step on each in turn; those that fail are opened again.

    Args:
        count: How many.
        begin: Opens a connection.
        step: Does something on it that does not wait; raises OSError if it has ended.
        pause_s: How long to wait between two rounds.
    """
    held: list[Any] = []
    while True:
        round_ends = time.monotonic() + max(pause_s, 0.25)
        while len(held) < count and time.monotonic() < round_ends:
            with suppress(OSError):
                held.append(begin())
        alive = []
        for each in held:
            try:
                step(each)
                alive.append(each)
            except OSError:
                getattr(each, "sock", each).close()
        held = alive
        time.sleep(pause_s)


def rounded_tensor_bytes(total: int) -> int:
    """Returns the size of tensors of which three fit into ``total`` bytes, with what a request has beside them."""
    return math.floor((total / 3 - 2**16) / 256) * 256
