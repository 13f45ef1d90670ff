"""The checks of addresses to listen on, and the limits of descriptors."""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bngrad_server.errors import ListenError
from bngrad_server.runtime.listening import check_address, max_connections, raise_descriptor_limit


def test_a_socket_with_a_listener_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:  # fills the queue
            first.connect(str(path))
            with pytest.raises(ListenError, match=f"cannot listen on unix:{path}: the address is taken"):
                check_address(f"unix:{path}")


def test_a_socket_that_was_left_behind_is_free(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert path.exists()
    check_address(f"unix:{path}")
    check_address(f"unix:{tmp_path / 'none'}")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("192.0.2.1:0", "Cannot assign requested address"),
        ("nowhere.invalid:1", "Name or service not known|Temporary failure in name resolution"),
        ("unix-abstract:1", "Name or service not known|Temporary failure in name resolution"),
        (f"{'x' * 64}:1", "it names no host"),
        ("unix:/nowhere/socket", "there is no folder /nowhere"),
        ("unix:/" + "x" * 120, "a socket's path has at most 107 bytes"),
        ("unix:/proc/socket", "no socket can be made in /proc: No such file or directory"),
        (f"unix:{__file__}", "the path exists and is not a socket"),
    ],
)
def test_an_address_that_cannot_be_listened_on_has_a_reason(address: str, reason: str) -> None:
    with pytest.raises(ListenError, match=rf"^cannot listen on {re.escape(address)}: ({reason})$"):
        check_address(address)


def test_a_port_in_use_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=rf"^cannot listen on 127.0.0.1:{port}: Address already in use$"):
            check_address(f"127.0.0.1:{port}")
    check_address(f"127.0.0.1:{port}")


def test_one_free_address_of_a_host_is_enough() -> None:
    check_address("localhost:0")


@pytest.fixture
def hard_limit() -> Iterator[int]:
    """The hard limit of descriptors; restores the limits after the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("descriptors", "addresses", "most"), [(256, 1, 128), (256, 2, 64), (3072, 1, 1536), (4096, 2, 1024)]
)
def test_connections_leave_descriptors_for_everything_else(
    hard_limit: int, descriptors: int, addresses: int, most: int
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard_limit))
    assert max_connections(addresses) == most


def test_a_server_raises_its_limit_of_open_files(hard_limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard_limit))
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard_limit, 65_536)
    raise_descriptor_limit()
