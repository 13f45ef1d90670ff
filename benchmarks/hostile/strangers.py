"""Attacks of strangers by handshakes, tokens and bytes that make no sense."""

from __future__ import annotations

import itertools
import secrets
import ssl
import warnings
from contextlib import suppress

from benchmarks.hostile.peer import PLAIN, Peer, headers, in_threads, prefixed
from benchmarks.hostile.victim import Victim

from bngrad_wire.http2 import frames


def wrong_tls(victim: Victim) -> None:
    """Stranger: no TLS, an outdated version, and another authority, as fast as possible"""
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    for how in itertools.cycle((None, old, ssl.create_default_context())):
        with suppress(OSError), victim.plain() as sock:
            if how is not None:
                how.wrap_socket(sock, server_hostname="elsewhere.example").close()
            else:
                sock.sendall(PLAIN)
                sock.recv(2**16)


def wrong_tokens(victim: Victim) -> None:
    """Stranger: calls with random tokens, one after the other on 2 connections a door"""
    message = frames.frame(frames.DATA, 0, 0, prefixed(bytes(5000)))[frames.HEADER_NBYTES :]

    def attack(number: int) -> None:
        with Peer(victim) as peer:
            for stream in range(1, 2**20, 2):
                data = frames.frame(frames.DATA, frames.END_STREAM, stream, message)
                peer.send(headers(stream, token=secrets.token_hex()) + data)
                peer.wait_for_end(stream, 10)

    in_threads(2, attack)


def new_handshakes(victim: Victim) -> None:
    """Stranger: connections that are closed after the handshake, as fast as possible in 4 threads a door"""

    def attack(number: int) -> None:
        while True:
            Peer(victim).sock.close()

    in_threads(4, attack)


def garbage(victim: Victim) -> None:
    """Stranger: random bytes, with and without TLS"""
    for connect in itertools.cycle((victim.plain, victim.connect)):
        with suppress(OSError), connect() as sock:
            sock.sendall(secrets.choice((b"", PLAIN)) + secrets.token_bytes(2**14))
            while sock.recv(2**16):
                pass
