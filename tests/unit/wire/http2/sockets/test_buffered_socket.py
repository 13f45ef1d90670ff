from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest

from bngrad_wire.http2.errors import PeerLostError
from bngrad_wire.http2.sockets.buffered_socket import BufferedSocket

_WITHOUT_MEMORY = """
import os, resource, socket
from pathlib import Path
from bngrad_wire.http2.sockets.buffered_socket import BufferedSocket
from bngrad_wire.http2.sockets.receive_buffer import LARGE_BUFFER_NBYTES

ours, theirs = socket.socketpair()
buffered = BufferedSocket(ours)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE"), resource.RLIM_INFINITY))
taken = []
try:
    while True:
        taken.append(bytearray(LARGE_BUFFER_NBYTES))
except MemoryError:
    pass
for _ in range(100):
    buffered.enlarge()
assert not buffered.is_large
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
buffered.enlarge()
assert buffered.is_large
"""


def congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize(("address", "is_own"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_large_messages_within_a_host_are_not_paced(address: str, is_own: bool) -> None:
    """Both ends have one address then; the system connects to 127.0.0.2 from 127.0.0.1."""
    with (
        socket.create_server((address, 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
    ):
        systems_choice = congestion_control(sock)
        buffered = BufferedSocket(sock)
        assert congestion_control(sock) == systems_choice
        buffered.expect_large_messages(are_kept=False)
        assert congestion_control(sock) == (b"reno" if is_own else systems_choice)


def test_a_buffer_grows_once_there_is_memory_for_it() -> None:
    """A process of its own, since the limit counts all memory of a process."""
    subprocess.run([sys.executable, "-c", _WITHOUT_MEMORY], check=True)


@pytest.mark.parametrize("action", ["receive", "send"])
def test_a_wait_ends_once_the_peer_is_known_to_be_lost(action: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        buffered = BufferedSocket(ours)
        buffered.set_timeout(0.05)
        buffered.waits = 100
        waited: list[float] = []

        def is_lost(seconds: float) -> bool:
            waited.append(seconds)
            return len(waited) == 3

        buffered.is_lost = is_lost
        with pytest.raises(PeerLostError, match="the peer does not answer"):
            buffered.fill(1) if action == "receive" else buffered.send([bytes(2**24)])
        assert waited == pytest.approx([0.05, 0.1, 0.15])
        assert buffered.broken is not None


def test_a_send_to_a_peer_that_stops_late_ends_at_its_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        buffered = BufferedSocket(ours)
        buffered.set_timeout(0.05)
        buffered.waits = 100
        begin = time.monotonic()
        buffered.deadline = begin + 0.4
        reading = threading.Timer(0.3, theirs.recv, [2**20])
        reading.start()
        with pytest.raises(TimeoutError):
            buffered.send([bytes(2**24)])
        assert time.monotonic() - begin < 2
        reading.join()
