"""What it means that there is no connection, over real sockets."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from tests.security.authority import Authority
from tests.unit.client.endpoints import full_listener

import bngrad
from bngrad._credentials import NO_CREDENTIALS, Credentials, check_security
from bngrad._deadline import Cancellation, Deadline
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


def test_a_unix_socket_with_a_full_queue_says_nothing_about_the_address(tmp_path: Path) -> None:
    with full_listener(f"{tmp_path}/socket") as listener:
        pool = ConnectionPool(listener.getsockname(), "a server", NO_CREDENTIALS)
        with pytest.raises(NoConnectionYetError):
            pool.lend(Deadline.after(60.0), Cancellation())


@pytest.mark.parametrize(("number", "error"), [(errno.EMFILE, NoConnectionYetError), (errno.EPERM, NotConnectedError)])
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
