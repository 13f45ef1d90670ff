"""Attacks by connections and calls that are begun and never finished."""

from __future__ import annotations

import itertools
import resource
import secrets
import socket
import struct
import time
from contextlib import suppress

from benchmarks.hostile.peer import PLAIN, Peer, header_block, headers, with_crowd
from benchmarks.hostile.victim import Victim

from bngrad_wire.http2 import frames

_HALF_OPEN = 5000
_HALF_MADE_CALLS = 512
_HEADERS_NBYTES = 50
_UPLOADS = 64
_UPLOAD_NBYTES = 3 * 2**20
_DRIPPING = 250
_DRIP_S = 0.1


def half_made_calls(victim: Victim) -> None:
    """Stranger: 512 connections a door that send HEADERS of 50 bytes without END_HEADERS, and stop"""
    said = PLAIN + frames.frame(frames.HEADERS, 0, 1, header_block()[:_HEADERS_NBYTES])
    more_descriptors()

    def begin() -> Peer:
        return Peer(victim, said)

    with_crowd(_HALF_MADE_CALLS, begin, Peer.poll, 0.1)


def half_made_local_calls(victim: Victim) -> None:
    """Local stranger: the same on the server's own Unix socket"""
    half_made_calls(victim)


def half_made_messages(victim: Victim) -> None:
    """Tenant: 512 connections a door that begin a message, and stop"""
    said = PLAIN + headers(1, token=victim.token) + frames.frame(frames.DATA, 0, 1, b"\0\0\0\x10\0" + bytes(100))
    more_descriptors()

    def begin() -> Peer:
        return Peer(victim, said)

    with_crowd(_HALF_MADE_CALLS, begin, _check_call, 0.1)


def dripping_uploads(victim: Victim) -> None:
    """Tenant: 64 connections a door that begin a message of 3 MiB, and go on byte by byte"""
    beginning = struct.pack(">BI", 0, _UPLOAD_NBYTES) + bytes(frames.MIN_FRAME_SIZE - 5)
    said = PLAIN + headers(1, token=victim.token) + frames.frame(frames.DATA, 0, 1, beginning)
    drip = frames.frame(frames.DATA, 0, 1, b"\0")

    def begin() -> Peer:
        return Peer(victim, said)

    def step(peer: Peer) -> None:
        _check_call(peer)
        peer.send(drip)

    with_crowd(_UPLOADS, begin, step, _DRIP_S)


def half_open(victim: Victim) -> None:
    """Stranger: 5,000 connections a door that send nothing or the first bytes of a TLS handshake"""
    more_descriptors()
    held: list[socket.socket] = []
    for number in itertools.count():
        if len(held) == _HALF_OPEN:
            oldest = held.pop(secrets.randbelow(len(held)))
            oldest.close()
            time.sleep(0.001)
        with suppress(OSError):
            held.append(victim.plain())
            if number % 2:
                held[-1].sendall(b"\x16\x03\x01\x02\x00\x01")


def headers_byte_by_byte(victim: Victim) -> None:
    """Tenant: 250 connections a door that send headers byte by byte"""
    said = PLAIN + headers(1, token=victim.token)
    sent: dict[Peer, int] = {}

    def begin() -> Peer:
        return Peer(victim, b"")

    def step(peer: Peer) -> None:
        count = sent.get(peer, 0)
        peer.send(said[count : count + 1])
        sent[peer] = count + 1

    with_crowd(_DRIPPING, begin, step, _DRIP_S)


def idle_connections(victim: Victim) -> None:
    """Stranger: 600 connections a door that finish the handshake and the preface, and stop"""
    more_descriptors()
    with_crowd(600, lambda: Peer(victim), Peer.poll, 0.1)


def _check_call(peer: Peer) -> None:
    """Raises OSError if the server has ended the only call of a connection, or the connection."""
    peer.poll()
    if peer.ended:
        raise ConnectionError("the call has ended")


def more_descriptors() -> None:
    """Raises this process's limit of descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
