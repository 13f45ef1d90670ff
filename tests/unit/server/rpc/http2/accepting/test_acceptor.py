"""Listening sockets in an event loop."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator

import pytest
from tests.unit.server.workers.additions import TIMEOUT_S, wait_until

from bngrad_server.rpc.http2.accepting.acceptor import Acceptor
from bngrad_server.runtime.event_loop import EventLoop


class Listener(socket.socket):
    """Has no file descriptor for the first connection."""

    is_short = True

    def accept(self) -> tuple[socket.socket, object]:
        if self.is_short:
            self.is_short = False
            raise OSError(errno.EMFILE, "no descriptors are left")
        return super().accept()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def test_connections_are_accepted_once_there_are_descriptors_again(listener: Listener) -> None:
    loop, accepted = EventLoop("accepts"), list[tuple[socket.socket, str]]()
    acceptor = Acceptor(loop, lambda sock, client: accepted.append((sock, client)))
    acceptor.listen(listener)
    acceptor.resume()
    loop.start()
    with socket.create_connection(listener.getsockname(), TIMEOUT_S):
        wait_until(lambda: not listener.is_short)
        assert accepted == []
        loop.call_soon(acceptor.resume)
        wait_until(lambda: len(accepted) == 1)
    ((sock, client),) = accepted
    assert client == "127.0.0.1"
    sock.close()
    loop.call_soon(acceptor.close)
    loop.stop(TIMEOUT_S)
    assert listener.fileno() == -1


def test_a_listener_that_could_not_be_watched_keeps_none_from_being_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, accepted = EventLoop("accepts"), list[socket.socket]()
    acceptor = Acceptor(loop, lambda sock, client: accepted.append(sock))
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    for each in listeners:
        acceptor.listen(each)
    add_reader = loop.add_reader

    def add_the_first(fd: int, callback: Callable[[], None]) -> None:
        if fd != listeners[0].fileno():
            raise OSError(errno.ENOSPC, "too many descriptors are watched")
        add_reader(fd, callback)

    with monkeypatch.context() as failing:
        failing.setattr(loop, "add_reader", add_the_first)
        acceptor.resume()
    acceptor.resume()
    loop.start()
    for each in listeners:
        socket.create_connection(each.getsockname(), TIMEOUT_S).close()
    wait_until(lambda: len(accepted) == 2)
    for sock in accepted:
        sock.close()
    loop.call_soon(acceptor.close)
    loop.stop(TIMEOUT_S)
