from __future__ import annotations

import socket
import subprocess
import sys

import pytest

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
