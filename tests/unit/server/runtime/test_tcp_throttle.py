"""Connections that send more than their calls explain are paused, by real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from bngrad_server.runtime import tcp_throttle
from bngrad_server.runtime.tcp_throttle import TcpThrottle

MIB = 2**20
MAX_MESSAGE_NBYTES = 8 * MIB


class Flooder:
    """A connection of which one end sends as much as the other takes."""

    def __init__(self, listener: socket.socket) -> None:
        self.sock = socket.create_connection(listener.getsockname())
        self._accepted, address = listener.accept()
        self.name = f"ipv4:{address[0]}:{address[1]}"
        self.received = 0
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, nbytes: int) -> int:
        """Sends until everything was received, or for half a second nothing; returns what was received of it."""
        before = self.received
        sender = threading.Thread(target=self._send, args=(nbytes,), daemon=True)
        sender.start()
        last, since = self.received, time.monotonic()
        while self.received < before + nbytes and time.monotonic() - since < 0.5:
            time.sleep(0.01)
            if self.received != last:
                last, since = self.received, time.monotonic()
        return self.received - before

    def close(self) -> None:
        self.sock.close()
        self._accepted.close()

    def _send(self, nbytes: int) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(bytes(nbytes))

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while piece := self._accepted.recv(2**16):
                self.received += len(piece)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def throttle(listener: socket.socket) -> TcpThrottle:
    throttle = TcpThrottle(MAX_MESSAGE_NBYTES)
    throttle.ports.add(listener.getsockname()[1])
    return throttle


@pytest.fixture
def flooder(listener: socket.socket) -> Iterator[Flooder]:
    with contextlib.closing(Flooder(listener)) as flooder:
        yield flooder


def test_a_stranger_that_floods_is_paused(throttle: TcpThrottle, flooder: Flooder) -> None:
    assert flooder.send(5 * MIB) == 5 * MIB
    throttle.look()
    assert flooder.send(MIB) == 0


def test_a_pause_ends(throttle: TcpThrottle, flooder: Flooder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_throttle, "_PAUSE_S", 0.0)
    flooder.send(5 * MIB)
    throttle.look()
    assert flooder.send(MIB) == 0
    throttle.look()
    deadline = time.monotonic() + 20
    while flooder.received < 6 * MIB and time.monotonic() < deadline:
        time.sleep(0.01)  # until the system sends again what was dropped
    assert flooder.received == 6 * MIB


def test_the_strangers_of_a_host_have_one_budget(throttle: TcpThrottle, listener: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(contextlib.closing(Flooder(listener))) for _ in range(3)]
        for flooder in flooders:
            flooder.send(2 * MIB)
        throttle.look()
        assert sorted(flooder.send(2**14) for flooder in flooders)[0] == 0
        newcomer = stack.enter_context(contextlib.closing(Flooder(listener)))
        newcomer.send(2**14)
        throttle.look()
        assert newcomer.send(2**14) == 2**14


def test_who_sends_messages_of_ops_is_not_paused(throttle: TcpThrottle, flooder: Flooder) -> None:
    peer = throttle.peer(flooder.name)
    for _ in range(20):
        with peer.op():
            flooder.send(4 * MIB)
            throttle.look()
            peer.useful += 4 * MIB
    assert flooder.send(MIB) == MIB


def test_a_message_that_follows_another_is_not_taken_for_a_flood(listener: socket.socket, flooder: Flooder) -> None:
    throttle = TcpThrottle(48 * MIB)
    throttle.ports.add(listener.getsockname()[1])
    peer = throttle.peer(flooder.name)
    for _ in range(3):
        with peer.op():
            flooder.send(20 * MIB)
            throttle.look()
            flooder.send(20 * MIB)
            peer.useful += 40 * MIB
        flooder.send(MIB)
        throttle.look()
        assert flooder.send(MIB) == MIB


def test_ops_do_not_excuse_a_flood(throttle: TcpThrottle, flooder: Flooder) -> None:
    peer = throttle.peer(flooder.name)
    with peer.op():
        flooder.send(32 * MIB)
        throttle.look()
        assert flooder.send(MIB) == 0


def test_connections_to_other_ports_are_left_alone(flooder: Flooder) -> None:
    throttle = TcpThrottle(MAX_MESSAGE_NBYTES)
    flooder.send(5 * MIB)
    throttle.look()
    assert flooder.send(MIB) == MIB
