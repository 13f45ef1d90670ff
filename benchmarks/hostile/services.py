"""Attacks on what is beside the ops: health, reflection, ServerInfo, leases, the HTTP address."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading

from benchmarks.hostile.half_made import more_descriptors
from benchmarks.hostile.peer import Peer, headers, in_threads, prefixed, with_crowd
from benchmarks.hostile.victim import Victim
from grpc_health.v1 import health_pb2

from bngrad_wire.http2 import frames
from bngrad_wire.lease_protocol import pack_request

_WATCHES = 600
_STREAMS_PER_CONNECTION = 60
_REGION_NBYTES = 2**22
_HELD_LEASES = 256
_WATCH = "/grpc.health.v1.Health/Watch"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_SERVER_INFO = "/bngrad.v1.BatchNormGradService/ServerInfo"
_OPEN_CALLS = (
    (_WATCH, health_pb2.HealthCheckRequest().SerializeToString(), True),
    (_REFLECTION, b"\x3a\0", False),
)
"""Methods, the message sent, and whether the call is half-closed."""


def open_streams(victim: Victim) -> None:
    """Tenant: 600 calls of health's Watch and reflection that stay open and whose answers are not read"""

    def begin() -> Peer:
        peer = Peer(victim, frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
        for number in range(_STREAMS_PER_CONNECTION):
            path, message, is_half_closed = _OPEN_CALLS[number % len(_OPEN_CALLS)]
            stream = 2 * number + 1
            peer.send(headers(stream, path, victim.token))
            peer.upload(stream, prefixed(message), end=is_half_closed)
        return peer

    def step(peer: Peer) -> None:
        peer.poll()
        if len(peer.ended) > _STREAMS_PER_CONNECTION // 2:
            raise ConnectionError("most calls have ended")

    with_crowd(_WATCHES // _STREAMS_PER_CONNECTION, begin, step, 0.1)


def server_infos(victim: Victim) -> None:
    """Tenant: ServerInfo as fast as it is answered, 100 calls at a time on 2 connections"""

    def attack(number: int) -> None:
        with Peer(victim, frames.PREFACE + frames.settings({})) as peer:
            for first in range(1, 2**24, 200):
                streams = range(first, first + 200, 2)
                calls = (
                    headers(stream, _SERVER_INFO, victim.token)
                    + frames.frame(frames.DATA, frames.END_STREAM, stream, prefixed(b""))
                    for stream in streams
                )
                peer.send(b"".join(calls))
                peer.wait_for_end(streams[-1], 10)
                peer.send(frames.window_update(0, 2**16))

    in_threads(2, attack)


def lease_floods(victim: Victim) -> None:
    """Local stranger: connections to the leases' socket with nothing, wrong tokens and malformed requests"""
    requests = itertools.cycle((b"", pack_request(_REGION_NBYTES, f"Bearer {secrets.token_hex()}"), b"\0", b"x" * 4000))

    def attack(number: int) -> None:
        with victim.plain() as sock:
            if said := next(requests):
                sock.sendall(said)
                sock.recv(4096)

    in_threads(4, attack)


def hold_leases(victim: Victim) -> None:
    """Local tenant: leases as much shared memory as it gets, and keeps it"""
    more_descriptors()
    request = pack_request(_REGION_NBYTES, f"Bearer {victim.token}" if victim.token else "")

    def begin() -> socket.socket:
        sock = victim.plain()
        sock.sendall(request)
        return sock

    with_crowd(_HELD_LEASES, begin, lambda _: None, 0.5)


def http_floods(victim: Victim) -> None:
    """Stranger: /metrics as fast as it is answered, and 500 HTTP requests that never end"""
    more_descriptors()

    def ask(number: int) -> None:
        with victim.plain() as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            while sock.recv(2**18):
                pass

    def begin() -> socket.socket:
        sock = victim.plain()
        sock.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        return sock

    threading.Thread(target=in_threads, args=(4, ask), daemon=True).start()
    with_crowd(500, begin, lambda sock: sock.send(b"x: y\r\n"), 1.0)
