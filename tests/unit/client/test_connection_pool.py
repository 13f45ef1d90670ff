"""What it means that there is no connection, over real sockets."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest
from tests.security.authority import Authority
from tests.servers import wait_until
from tests.unit.client.endpoints import Endpoint, endpoint, full_listener

import bngrad
from bngrad._credentials import NO_CREDENTIALS, Credentials, Security, check_security
from bngrad._deadline import ENDLESS, Cancellation, Deadline
from bngrad._transports import connection_pool
from bngrad._transports.connection_pool import ConnectionPool, NoConnectionYetError, NotConnectedError


@pytest.mark.parametrize(("timeout", "error"), [(0.2, NoConnectionYetError), (60.0, NotConnectedError)])
def test_a_handshake_that_its_call_cut_short_says_nothing_about_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float, error: type[NotConnectedError]
) -> None:
    monkeypatch.setattr(connection_pool, "_HANDSHAKE_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        security = check_security([target], bngrad.Tls(ca=Authority(tmp_path).path), None, False)
        pool = ConnectionPool(silent.getsockname(), target, Credentials(security, target, None))
        with pytest.raises(NotConnectedError, match="timed out") as raised:
            pool.lend(Deadline.after(timeout), Cancellation())
        assert type(raised.value) is error


class Handshakes(Credentials):
    """Notes how long each handshake may take, and lets it fail."""

    def __init__(self) -> None:
        super().__init__(Security(), "")
        self.seconds: list[float | None] = []

    def secured(self, sock: socket.socket, cancellation: Cancellation) -> socket.socket:
        self.seconds.append(sock.gettimeout())
        sock.close()
        raise OSError("for a test")


def test_a_handshake_leaves_half_of_the_time_to_another_transport() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pool = ConnectionPool(listener.getsockname(), "it", credentials := Handshakes())
        for deadline in (Deadline.after(4.0), Deadline.after(60.0), ENDLESS):
            with pytest.raises(NotConnectedError):
                pool.lend(deadline, Cancellation())
    first, *others = credentials.seconds
    assert first is not None
    assert 0.0 < first <= 2.0
    assert others == [5.0, 5.0]


class Cut(Credentials):
    """Ends each connection before anything is sent."""

    def secured(self, sock: socket.socket, cancellation: Cancellation) -> socket.socket:
        sock.shutdown(socket.SHUT_RDWR)
        return sock


def test_a_connection_that_ends_before_anything_was_sent_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pool = ConnectionPool(listener.getsockname(), "it", Cut(Security(), ""))
        with pytest.raises(NotConnectedError):
            pool.lend(ENDLESS, Cancellation())


def test_a_unix_socket_needs_no_tls(tmp_path: Path) -> None:
    security = check_security(["localhost:1"], bngrad.Tls(ca=Authority(tmp_path).path), None, False)
    with (
        endpoint(lambda call: call.end(), f"{tmp_path}/socket") as peer,
        closing(ConnectionPool(peer.address, "it", Credentials(security, "localhost:1", None))) as pool,
    ):
        pool.give_back(pool.lend(ENDLESS, Cancellation()))


@pytest.mark.parametrize(
    ("fresh_s", "must_be_open", "is_open"), [(60.0, False, False), (60.0, True, True), (0.0, False, True)]
)
def test_only_a_call_that_may_be_repeated_gets_a_fresh_connection_without_a_look(
    monkeypatch: pytest.MonkeyPatch, fresh_s: float, must_be_open: bool, is_open: bool
) -> None:
    monkeypatch.setattr(connection_pool, "_FRESH_S", fresh_s)
    with endpoint(lambda call: call.end()) as peer, closing(pool_of(peer)) as pool:
        pool.give_back(before := pool.lend(ENDLESS, Cancellation()))
        lent = pool.lend(ENDLESS, Cancellation(), must_be_open=must_be_open)
        assert (lent.connection, lent.is_open) == (before.connection, is_open)
        pool.give_back(lent)


def test_a_connection_that_the_server_has_closed_is_closed_and_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "_FRESH_S", 60.0)
    with endpoint(lambda call: call.end()) as peer, closing(pool_of(peer)) as pool:
        pool.give_back(before := pool.lend(ENDLESS, Cancellation()))
        wait_until(lambda: peer._sockets)  # it has accepted the connection
        peer.cut()
        wait_until(lambda: not before.connection.usable)
        after = pool.lend(ENDLESS, Cancellation())
        assert after.connection.usable
        assert before.sock.fileno() < 0
        pool.give_back(after)


def test_a_few_idle_connections_are_kept_and_closed_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "_MAX_IDLE", 2)
    with endpoint(lambda call: call.end()) as peer, closing(pool_of(peer)) as pool:
        lent = [pool.lend(ENDLESS, Cancellation()) for _ in range(3)]
        for each in lent:
            pool.give_back(each)
        assert [each.sock.fileno() >= 0 for each in lent] == [True, True, False]
        pool.close()
        assert all(each.sock.fileno() < 0 for each in lent)


def test_closing_ends_a_connection_that_is_being_made() -> None:
    with full_listener() as listener, closing(ConnectionPool(listener.getsockname(), "it", NO_CREDENTIALS)) as pool:
        with pytest.raises(NoConnectionYetError):
            pool.lend(ENDLESS, Cancellation())
        pending = pool._connector._pending
        assert pending is not None
        pool.close()
        assert pending.sock.fileno() < 0


def pool_of(peer: Endpoint) -> ConnectionPool:
    return ConnectionPool(peer.address, "a server", NO_CREDENTIALS)


def test_a_unix_socket_with_a_full_queue_says_nothing_about_the_address(tmp_path: Path) -> None:
    with full_listener(f"{tmp_path}/socket") as listener:
        pool = ConnectionPool(listener.getsockname(), "a server", NO_CREDENTIALS)
        with pytest.raises(NoConnectionYetError):
            pool.lend(Deadline.after(60.0), Cancellation())
        assert pool.is_reachable()


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.EMFILE, NoConnectionYetError),
        (errno.ENFILE, NoConnectionYetError),
        (errno.EPERM, NotConnectedError),
    ],
)
def test_a_process_without_descriptors_says_nothing_about_the_address(
    monkeypatch: pytest.MonkeyPatch, number: int, error: type[NotConnectedError]
) -> None:
    def fail(family: int) -> socket.socket:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", fail)
    pool = ConnectionPool("/no/such/socket", "a server", NO_CREDENTIALS)
    with pytest.raises(NotConnectedError, match=os.strerror(number)) as raised:
        pool.lend(Deadline.after(60.0), Cancellation())
    assert type(raised.value) is error
