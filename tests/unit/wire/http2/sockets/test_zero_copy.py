from __future__ import annotations

import array
import ctypes
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from bngrad_wire.fields import Buffer
from bngrad_wire.http2.sockets import zero_copy
from bngrad_wire.http2.sockets.buffered_socket import BufferedSocket
from bngrad_wire.http2.sockets.peers import is_own_peer

_MIB = 2**20
_TIMEOUT_S = 30.0
_MEMFD_SECRET = 447
_NEEDS_LARGE_BUFFERS = pytest.mark.skipif(
    int(Path("/proc/sys/net/core/wmem_max").read_text()) < _MIB, reason="the system allows no buffer of 1 MB"
)
_GREETER = """
import os, socket
os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.send(b"hello")
sock.recv(1)
"""
_CONNECT = """
import os, resource, socket, threading
from bngrad_wire.http2.sockets.buffered_socket import BufferedSocket

def connect():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        buffered = BufferedSocket(socket.create_connection(listener.getsockname()))
        buffered.expect_large_messages(are_kept=True)
        buffered.set_timeout(30)
        return buffered, listener.accept()[0]

piece, received = os.urandom(4 * 2**20), bytearray()
"""
_WITHOUT_DESCRIPTORS = """
buffered, theirs = connect()
resource.setrlimit(resource.RLIMIT_NOFILE, (theirs.fileno() + 2, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if not os.fork():
    buffered.send([piece])
    os._exit(0)
while len(received) < len(piece):
    received += theirs.recv(2**20)
assert received == piece
assert os.wait()[1] == 0
"""
_SENDING = {"send", "fill", "empty"}
_FORK = """
def pipes():
    links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    return {os.readlink(each) for each in links if os.path.lexists(each) and "pipe:" in os.readlink(each)}

def send():
    buffered, theirs = connect()
    received.clear()
    thread = threading.Thread(target=buffered.send, args=([piece],))
    thread.start()
    while len(received) < len(piece):
        received.extend(theirs.recv(2**20))
    thread.join()
    assert received == piece and buffered.has_lent

inherited = pipes()
send()
opened = pipes() - inherited
assert len(opened) == 1
if not os.fork():
    assert not opened & pipes()
    send()
    os._exit(0)
send()
assert os.wait()[1] == 0
assert pipes() - inherited == opened
"""


def secret_memory(nbytes: int) -> mmap.mmap:
    """Returns memory whose pages the system gives to nothing but this process, as a device's memory may be."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(_MEMFD_SECRET, 0)
    if fd < 0:
        pytest.skip(f"the system has no memfd_secret: {os.strerror(ctypes.get_errno())}")
    os.ftruncate(fd, nbytes)
    with closing(os.fdopen(fd)):
        return mmap.mmap(fd, nbytes)


@contextmanager
def connection(server: str = "127.0.0.1", client: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yields both ends, of which the second was accepted; "unix" makes a pair of Unix sockets."""
    if server == "unix":
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.settimeout(_TIMEOUT_S)
            yield ours, theirs
        return
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with (
        socket.create_server((server, 0), family=family, dualstack_ipv6=server == "::") as listener,
        socket.create_connection((client, listener.getsockname()[1])) as ours,
        listener.accept()[0] as theirs,
    ):
        theirs.settimeout(_TIMEOUT_S)
        yield ours, theirs


@contextmanager
def sender(sock: socket.socket, timeout_s: float = _TIMEOUT_S) -> Iterator[BufferedSocket]:
    with closing(BufferedSocket(sock)) as buffered:
        buffered.set_timeout(timeout_s)
        buffered.expect_large_messages(are_kept=True)
        yield buffered


def wait_until_readable(sock: socket.socket, nbytes: int) -> None:
    arrived = array.array("i", [0])
    end = time.monotonic() + _TIMEOUT_S
    while arrived[0] < nbytes:
        assert time.monotonic() < end
        fcntl.ioctl(sock, termios.FIONREAD, arrived)


def read(sock: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        received += sock.recv(min(777_777, nbytes - len(received)))
    return bytes(received)


def read_to_the_end(sock: socket.socket) -> None:
    with suppress(ConnectionError):
        while sock.recv(_MIB):
            pass


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["127.0.0.1", pytest.param("unix", marks=_NEEDS_LARGE_BUFFERS)])
def test_the_peer_reads_the_senders_own_memory(kind: str) -> None:
    memory = np.zeros(8 * _MIB, np.uint8)
    with connection(kind) as (ours, theirs), sender(ours) as buffered, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(buffered.send, [memory.data])
        wait_until_readable(theirs, 1000)
        memory[:1000] = 1
        received = read(theirs, memory.nbytes)
        sending.result(_TIMEOUT_S)
    assert received == memory.tobytes()


@pytest.mark.parametrize("nbytes", [2 * _MIB, 2 * _MIB + 1, 5 * _MIB + 4097])
@pytest.mark.parametrize("offset", [0, 1, 4095])
@pytest.mark.parametrize("memory", [bytes, bytearray])
@pytest.mark.parametrize("kind", ["127.0.0.1", "unix"])
def test_all_bytes_arrive_in_order(
    nbytes: int, offset: int, memory: Callable[[bytes], bytes | bytearray], kind: str
) -> None:
    piece: Buffer = memoryview(memory(np.random.default_rng(nbytes).bytes(nbytes + offset)))[offset:]
    pieces: list[Buffer] = [b"head", piece, b"between", bytes(1000), piece[: 3 * _MIB], piece[:-1], b"tail"]
    expected = b"".join(pieces)
    with connection(kind) as (ours, theirs), sender(ours) as buffered, ThreadPoolExecutor(1) as thread:
        received = thread.submit(read, theirs, len(expected))
        assert buffered.send(pieces) == b""
        assert received.result(_TIMEOUT_S) == expected


def test_all_bytes_arrive_also_with_a_timeout_of_pythons_own() -> None:
    piece = np.random.default_rng(0).bytes(16 * _MIB)
    with connection() as (ours, theirs), sender(ours) as buffered, ThreadPoolExecutor(1) as thread:
        ours.settimeout(_TIMEOUT_S)
        sending = thread.submit(buffered.send, [piece])
        wait_until_readable(theirs, 1000)
        time.sleep(0.1)  # until both ends' buffers are full
        assert read(theirs, len(piece)) == piece
        assert sending.result(_TIMEOUT_S) == b""


@pytest.mark.parametrize("kind", ["127.0.0.1", "unix"])
def test_a_peer_that_does_not_read_ends_the_connection_after_the_timeout(kind: str) -> None:
    before = open_descriptors()
    with connection(kind) as (ours, _), sender(ours, timeout_s=0.05) as buffered:
        with pytest.raises(TimeoutError):
            buffered.send([bytes(64 * _MIB)])
        assert buffered.broken
    assert open_descriptors() <= before  # its pipe may have been open already


@pytest.mark.parametrize("kind", ["127.0.0.1", "unix"])
def test_a_peer_that_goes_away_is_noticed(kind: str) -> None:
    with connection(kind) as (ours, theirs), sender(ours) as buffered, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(buffered.send, [bytes(64 * _MIB)])
        wait_until_readable(theirs, 1000)
        theirs.close()
        with pytest.raises(ConnectionError):
            sending.result(_TIMEOUT_S)


def test_memory_without_pages_to_lend_is_copied() -> None:
    memory = secret_memory(4 * _MIB)
    memory[:] = np.random.default_rng(0).bytes(4 * _MIB)
    pieces: list[Buffer] = [bytes(3 * _MIB), memoryview(memory), bytes(3 * _MIB)]
    expected = b"".join(pieces)
    with connection() as (ours, theirs), sender(ours) as buffered, ThreadPoolExecutor(1) as thread:
        received = thread.submit(read, theirs, len(expected))
        assert buffered.send(pieces) == b""
        assert received.result(_TIMEOUT_S) == expected


def test_it_copies_where_no_descriptor_is_left() -> None:
    subprocess.run([sys.executable, "-c", _CONNECT + _WITHOUT_DESCRIPTORS], check=True, timeout=_TIMEOUT_S)


@pytest.mark.parametrize(
    ("server", "client"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("::", "::1"), ("unix", "unix")],
)
def test_a_peer_of_this_user_is_its_own(server: str, client: str) -> None:
    with connection(server, client) as (ours, _):
        assert is_own_peer(ours)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_peer_of_another_user_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", _GREETER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as ours:
            assert ours.recv(5) == b"hello"
            assert not is_own_peer(ours)


def test_a_peer_that_has_gone_is_not() -> None:
    with connection() as (ours, theirs):
        theirs.close()
        ours.close()
        assert not is_own_peer(ours)


def test_sockets_that_find_no_pipe_copy() -> None:
    piece = np.random.default_rng(0).bytes(2 * _MIB)
    with ExitStack() as stack:
        ends = [stack.enter_context(connection()) for _ in range(40)]
        sending = [stack.enter_context(sender(ours)) for ours, _ in ends]
        before = open_descriptors()
        with ThreadPoolExecutor(len(ends)) as threads:
            sent = [threads.submit(each.send, [piece, piece]) for each in sending]
            for _, theirs in ends:
                wait_until_readable(theirs, 1000)
            assert open_descriptors() <= before + 2 * 16
            assert all(read(theirs, 2 * len(piece)) == piece + piece for _, theirs in ends)
            assert all(each.result(_TIMEOUT_S) == b"" for each in sent)
        assert 0 < sum(each.has_lent for each in sending) <= len(ends)


def test_a_fork_does_not_share_its_parents_pipes() -> None:
    subprocess.run([sys.executable, "-c", _CONNECT + _FORK], check=True, timeout=_TIMEOUT_S)


def test_after_ctrl_c_at_any_step_no_other_socket_sends_what_was_left() -> None:
    left, other = (np.random.default_rng(seed).bytes(2 * _MIB) for seed in range(2))
    for steps in range(10_000):
        with connection() as (ours, theirs), ThreadPoolExecutor(1) as thread, sender(ours) as buffered:
            thread.submit(read_to_the_end, theirs)
            was_interrupted = is_interrupted_after(steps, buffered.send, [left])
        with connection() as (ours, theirs), sender(ours) as buffered, ThreadPoolExecutor(1) as thread:
            received = thread.submit(read, theirs, len(other))
            buffered.send([other])
            assert received.result(_TIMEOUT_S) == other
            assert buffered.has_lent
        if not was_interrupted:
            break
    assert steps > 100


def is_interrupted_after(steps: int, send: Callable[[list[Buffer]], bytes], pieces: list[Buffer]) -> bool:
    """Raises KeyboardInterrupt before a bytecode that sends; returns whether it had not ended by then."""
    left = steps

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_globals["__name__"] != zero_copy.__name__ or frame.f_code.co_name not in _SENDING:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            send(pieces)
    finally:
        sys.settrace(None)
    return left < 0
