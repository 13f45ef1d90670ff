"""Attacks of tenants that announce requests of the size of the whole arena."""

from __future__ import annotations

import time

from benchmarks.hostile.peer import (
    CREDIT,
    EXCHANGE,
    Peer,
    chunk,
    exchange_header,
    headers,
    in_threads,
    rounded_tensor_bytes,
)
from benchmarks.hostile.victim import Victim

from bngrad_wire.http2 import frames

_CONNECTIONS = 2
_DRIP_S = 1.0
_TRICKLE_BYTES_PER_S = 2**17
_TRICKLE_CHUNK = 2**15
_CHUNK = 2**20


def announce_then_nothing(victim: Victim) -> None:
    """Tenant: announces tensors that fill the arena by an 800-byte header, then sends nothing"""
    in_threads(_CONNECTIONS, lambda _: _announced(victim).wait_for_end(1))


def announce_then_drip(victim: Victim) -> None:
    """Tenant: announces tensors that fill the arena, then sends a byte a second"""

    def attack(number: int) -> None:
        peer = _announced(victim)
        peer.upload(1, chunk(_CHUNK)[:8])
        while 1 not in peer.ended:
            time.sleep(_DRIP_S)
            peer.upload(1, b"\0")

    in_threads(_CONNECTIONS, attack)


def announce_then_trickle(victim: Victim) -> None:
    """Tenant: announces tensors that fill the arena, then sends them at 128 KiB/s"""
    piece = chunk(_TRICKLE_CHUNK)

    def attack(number: int) -> None:
        peer = _announced(victim)
        while 1 not in peer.ended:
            peer.upload(1, piece)
            time.sleep(_TRICKLE_CHUNK / _TRICKLE_BYTES_PER_S)

    in_threads(_CONNECTIONS, attack)


def ask_for_everything(victim: Victim) -> None:
    """Tenant: keeps asking for the whole arena, sends it all and reads the answers, on two connections a door"""
    nbytes = rounded_tensor_bytes(victim.arena_bytes)
    pieces = [chunk(_CHUNK)] * (nbytes // _CHUNK)
    if nbytes % _CHUNK:
        pieces.append(chunk(nbytes % _CHUNK))

    def attack(number: int) -> None:
        with _announced(victim) as peer:
            for piece in (*pieces, *pieces):
                peer.upload(1, piece)
            peer.send(frames.frame(frames.DATA, frames.END_STREAM, 1, b""))
            peer.wait_for_end(1)

    in_threads(_CONNECTIONS, attack)


def _announced(victim: Victim) -> Peer:
    peer = Peer(victim, CREDIT)
    peer.send(headers(1, EXCHANGE, victim.token))
    peer.upload(1, exchange_header(rounded_tensor_bytes(victim.arena_bytes)))
    return peer
