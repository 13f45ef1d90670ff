"""Attacks of tenants by the content and the size of messages."""

from __future__ import annotations

import struct
import time
import zlib

from benchmarks.hostile.peer import (
    CREDIT,
    EXCHANGE,
    NO_CREDIT,
    Peer,
    chunk,
    exchange_header,
    headers,
    in_threads,
    prefixed,
    unary_message,
    with_crowd,
)
from benchmarks.hostile.victim import Victim

from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode

_UNKNOWN_NBYTES = 8 * 2**20
_SLOW_NBYTES = 2**16
_SLOW_BYTES_PER_S = 450_000
_CONNECTIONS = 4
_UNENDED = 40
_UNENDED_NBYTES = (2**24, 2**25, 2**26)
_UNREAD_CALLS = 900
_UNREAD_STREAMS = 90
_UNREAD_EXCHANGES = 100
_UNREAD_NBYTES = 2**20
_GZIP_ZEROS_BYTES = 2**30
_FIELDS = {
    "varints": b"\x78\0",
    "empty strings": b"\x7a\0",
    "empty groups": b"\x7b\x7c",
    "known scalars": b"\x48\0",
    "empty tensors": b"\x0a\0",
}
"""Fields of two bytes, by what they are."""


def unknown_fields(victim: Victim) -> None:
    """Tenant: unary messages of 8 MiB of two-byte fields, on 4 connections a door as fast as they are refused"""
    kinds = [prefixed(field * (_UNKNOWN_NBYTES // 2)) for field in _FIELDS.values()]
    _send_messages(victim, kinds, 0.0)


def unknown_fields_slowly(victim: Victim) -> None:
    """Tenant: unary messages of 64 KiB of two-byte fields, 4 connections at 0.45 MB/s in all"""
    kinds = [prefixed(field * (_SLOW_NBYTES // 2)) for field in _FIELDS.values()]
    _send_messages(victim, kinds, _CONNECTIONS * _SLOW_NBYTES / _SLOW_BYTES_PER_S)


def nested_fields(victim: Victim) -> None:
    """Tenant: unary messages of 8 MiB whose tensor consists of two-byte fields, on 4 connections a door"""
    kinds = []
    for field in (b"\x78\0", b"\x7b\x7c", b"\x10\x01", b"\x1a\0"):  # unknown, a group, a dimension, empty data
        inner = field * (_UNKNOWN_NBYTES // 2)
        kinds.append(prefixed(b"\x0a" + _varint(len(inner)) + inner))
    _send_messages(victim, kinds, 0.0)


def _send_messages(victim: Victim, kinds: list[bytes], pause_s: float) -> None:
    def attack(number: int) -> None:
        with Peer(victim, CREDIT) as peer:
            for turn in range(2**20):
                stream = 2 * turn + 1
                peer.send(headers(stream, token=victim.token))
                peer.upload(stream, kinds[(turn + number) % len(kinds)], end=True)
                peer.wait_for_end(stream, 60)
                time.sleep(pause_s)

    in_threads(_CONNECTIONS, attack)


def bombs(victim: Victim) -> None:
    """Tenant: compressed messages of a megabyte that expand to a gigabyte"""
    packer = zlib.compressobj(9, wbits=31)
    packed = b"".join(packer.compress(bytes(2**20)) for _ in range(_GZIP_ZEROS_BYTES // 2**20)) + packer.flush()
    message = b"\1" + len(packed).to_bytes(4, "big") + packed

    def attack(number: int) -> None:
        with Peer(victim) as peer:
            peer.send(headers(1, token=victim.token, extra=(("grpc-encoding", "gzip"),)))
            peer.upload(1, message)
            peer.wait_for_end(1, 5)

    in_threads(1, attack)


def unended_messages(victim: Victim) -> None:
    """Tenant: 40 connections a door that send messages of 16, 32 and 64 MiB but for the last byte"""

    def attack(number: int) -> None:
        nbytes = _UNENDED_NBYTES[number % len(_UNENDED_NBYTES)]
        with Peer(victim) as peer:
            peer.send(headers(1, token=victim.token))
            peer.upload(1, struct.pack(">BI", 0, nbytes))
            piece = bytes(2**20)
            for _ in range(nbytes // 2**20 - 1):
                peer.upload(1, piece)
            peer.upload(1, piece[1:])
            peer.wait_for_end(1)

    in_threads(_UNENDED, attack)


def unread_responses(victim: Victim) -> None:
    """Tenant: 900 unary calls of 1 MiB tensors, whose answers get no window"""
    message = unary_message(_UNREAD_NBYTES)

    def attack(number: int) -> None:
        with Peer(victim, NO_CREDIT) as peer:
            for stream in range(1, 2 * _UNREAD_STREAMS, 2):
                peer.send(headers(stream, token=victim.token))
                peer.upload(stream, message, end=True)
            while len(peer.ended) < _UNREAD_STREAMS // 2:
                time.sleep(0.1)
                peer.poll()

    in_threads(_UNREAD_CALLS // _UNREAD_STREAMS, attack)


def unread_exchanges(victim: Victim) -> None:
    """Tenant: 100 connections a door with an exchange of 1 MiB tensors whose answer gets no window"""
    upload = exchange_header(_UNREAD_NBYTES) + 2 * chunk(_UNREAD_NBYTES)

    def begin() -> Peer:
        peer = Peer(victim, NO_CREDIT)
        peer.send(headers(1, EXCHANGE, victim.token))
        peer.upload(1, upload, end=True)
        return peer

    def step(peer: Peer) -> None:
        peer.poll()
        if peer.ended:
            raise ConnectionError("the call has ended")

    with_crowd(_UNREAD_EXCHANGES, begin, step, 0.1)


def quick_cancels(victim: Victim) -> None:
    """Tenant: whole calls that are cancelled at once, 50 at a time on 2 connections a door"""
    message = unary_message(4096)

    def attack(number: int) -> None:
        with Peer(victim) as peer:
            stream = 1
            while True:
                said = []
                for _ in range(50):
                    data = frames.frame(frames.DATA, frames.END_STREAM, stream, message)
                    said.append(
                        headers(stream, token=victim.token) + data + frames.rst_stream(stream, ErrorCode.CANCEL)
                    )
                    stream += 2
                peer.send(b"".join(said))
                peer.poll()

    in_threads(2, attack)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))
