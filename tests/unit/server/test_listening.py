"""What is said of an address that cannot be listened on."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bngrad_server.listening import ListenError, check_socket, max_connections, raise_descriptor_limit, why_not


def test_a_socket_on_which_somebody_listens_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:  # It fills the queue.
            first.connect(str(path))
            with pytest.raises(ListenError, match=f"cannot listen on unix:{path}: the address is taken"):
                check_socket(path)


def test_a_socket_that_was_left_behind_is_free(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert path.exists()
    check_socket(path)
    check_socket(tmp_path / "none")
    check_socket(tmp_path / ("x" * 120))


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("192.0.2.1:0", "Cannot assign requested address"),
        ("nowhere.invalid:1", "Name or service not known"),
        ("unix:/nowhere/socket", "there is no folder /nowhere"),
        ("unix:/" + "x" * 120, "it is no path for a socket"),
    ],
)
def test_the_reason_is_told(address: str, reason: str) -> None:
    assert why_not(address) == reason


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert why_not(f"127.0.0.1:{listener.getsockname()[1]}") == "Address already in use"


@pytest.fixture
def hard_limit() -> Iterator[int]:
    """How many descriptors this process could have; what a test changes is changed back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("descriptors", "addresses", "most"), [(256, 1, 128), (256, 2, 64), (3072, 1, 1536), (4096, 2, 1024)]
)
def test_connections_leave_descriptors_to_others(hard_limit: int, descriptors: int, addresses: int, most: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard_limit))
    assert max_connections(addresses) == most


def test_a_server_opens_as_many_files_as_it_may(hard_limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard_limit))
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard_limit, 65_536)
    raise_descriptor_limit()
