"""The checks of addresses to listen on, and the limits of descriptors."""

from __future__ import annotations

import os
import re
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.permissions import denied

from bngrad_server.errors import ListenError
from bngrad_server.runtime.listening import (
    bindable_addresses,
    check_path,
    max_connections,
    raise_descriptor_limit,
    tcp_listeners,
    unix_listener,
)


def test_a_socket_with_a_listener_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:  # fills the queue
            first.connect(str(path))
            with pytest.raises(ListenError, match=f"cannot listen on unix:{path}: the address is taken"):
                check_path(path)


def test_a_socket_that_was_left_behind_is_free(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert path.exists()
    check_path(path)
    check_path(tmp_path / "none")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/nowhere/socket", "there is no folder /nowhere"),
        ("/" + "x" * 120, "a socket's path has at most 107 bytes"),
        ("/proc/socket", "no socket can be made in /proc: No such file or directory"),
        (__file__, "the path exists and is not a socket"),
    ],
)
def test_a_path_that_cannot_be_listened_on_has_a_reason(path: str, reason: str) -> None:
    with pytest.raises(ListenError, match=rf"^cannot listen on unix:{re.escape(path)}: {reason}$"):
        check_path(Path(path))


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "socket"
    monkeypatch.setattr(os, "stat", denied(path, os.stat))  # root would be let in
    with pytest.raises(ListenError, match=f"unix:{path}: no socket can be made in {tmp_path}: Permission denied$"):
        check_path(path)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "Cannot assign requested address"),
        ("nowhere.invalid", "Name or service not known|Temporary failure in name resolution"),
        ("unix-abstract", "Name or service not known|Temporary failure in name resolution"),
        ("x" * 64, "it names no host"),
    ],
)
def test_a_host_that_cannot_be_listened_on_has_a_reason(host: str, reason: str) -> None:
    with pytest.raises(ListenError, match=rf"^cannot listen on {re.escape(host)}:1: ({reason})$"):
        bindable_addresses(host, 1)


def test_a_port_in_use_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=rf"^cannot listen on 127.0.0.1:{port}: Address already in use$"):
            bindable_addresses("127.0.0.1", port)
    assert bindable_addresses("127.0.0.1", port) == [("127.0.0.1", port)]


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The addresses of the host "both", beside one that this machine does not have."""
    addresses = ("127.0.0.1", "127.0.0.2")
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in ("192.0.2.1", *addresses)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    return addresses


def test_a_host_has_one_port_on_all_its_addresses(two_addresses: tuple[str, str]) -> None:
    bound = bindable_addresses("both", 0)
    assert bound == [(each, bound[0][1]) for each in two_addresses]
    assert bindable_addresses("both", bound[0][1]) == bound


def test_a_port_that_is_in_use_on_one_address_of_a_host_is_taken(two_addresses: tuple[str, str]) -> None:
    with socket.create_server((two_addresses[1], 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=rf"^cannot listen on both:{port}: Address already in use$"):
            bindable_addresses("both", port)


def test_the_listeners_of_a_host_are_closed_when_another_address_of_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    overlapping = ("127.0.0.1", "0.0.0.0")  # noqa: S104 - it is never listened on
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in overlapping]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ListenError, match=r"^cannot listen on 0.0.0.0:\d+: Address already in use") as raised:
        tcp_listeners("both", 0)
    monkeypatch.undo()
    port = int(str(raised.value).split(":")[1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.fixture
def hard_limit() -> Iterator[int]:
    """The hard limit of descriptors; restores the limits after the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("descriptors", "most"), [(256, 64), (3072, 768), (4096, 1024), (65_536, 4096)])
def test_connections_leave_descriptors_for_everything_else(hard_limit: int, descriptors: int, most: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(descriptors, hard_limit), hard_limit))
    assert max_connections() == most


def test_a_server_raises_its_limit_of_open_files(hard_limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard_limit))
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard_limit, 65_536)
    raise_descriptor_limit()


def test_a_connection_whose_host_has_gone_ends_in_the_end() -> None:
    (listener,) = tcp_listeners("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10


def test_a_unix_socket_has_its_permissions_and_takes_the_place_of_one_that_was_left(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for mode in (0o600, 0o660):
        with unix_listener(path, mode) as listener:
            assert stat.S_IMODE(path.stat().st_mode) == mode
            with pytest.raises(ListenError, match="the address is taken"):
                unix_listener(path, mode)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                listener.accept()[0].close()


def test_a_unix_socket_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    with pytest.raises(ListenError, match=f"cannot listen on unix:{path}: the path exists and is not a socket"):
        unix_listener(path, 0o600)
    assert path.read_text() == "kept"
