"""The addresses of servers."""

from __future__ import annotations

import pytest

from bngrad_wire.addresses import format_host_port, grpcio_address, host_and_port, is_local, unix_path


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:0", ("localhost", 0)),
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("[::1]:7", ("::1", 7)),
        ("[fe80::1%eth0]:7", ("fe80::1%eth0", 7)),
        ("host:999999999", ("host", 999999999)),
    ],
)
def test_host_and_port_are_parsed(address: str, expected: tuple[str, int]) -> None:
    assert host_and_port(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "host:", ":1", "[]:1", "[::1]", "::1:1", "a:b:1", "a b:1", "a:1\n", "a:-1", "a:+1", "a:\u0661"),
        *("unix:/a", "unix:/a:1", "dns:///a:1", "http://a:1", "a:" + "9" * 5000),
    ],
)
def test_other_addresses_have_no_host_and_port(address: str) -> None:
    assert host_and_port(address) is None


@pytest.mark.parametrize("address", ["localhost:1", "10.0.0.1:50051", "[::1]:65535"])
def test_host_and_port_are_formatted_as_they_are_parsed(address: str) -> None:
    parsed = host_and_port(address)
    assert parsed is not None
    assert format_host_port(*parsed) == address


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("unix:/a/b", "/a/b"),
        ("unix:a", "a"),
        ("unix:///a/b", "/a/b"),
        ("unix:/a:1", "/a:1"),
        ("unix:", ""),
        ("unix-abstract:a", None),
        ("unix", None),
        ("localhost:1", None),
    ],
)
def test_only_unix_addresses_have_a_path(address: str, expected: str | None) -> None:
    assert unix_path(address) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("unix:/a%41 é", "unix:/a%2541%20%C3%A9"),
        ("unix:///a", "unix:/a"),
        ("unix:a", "unix:a"),
        ("[fe80::1%eth0]:7", "[fe80::1%eth0]:7"),
        ("dns:///a%41", "dns:///a%41"),
    ],
)
def test_only_paths_are_escaped_for_grpcio(address: str, expected: str) -> None:
    assert grpcio_address(address) == expected


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/a"])
def test_loopback_and_unix_sockets_are_local(address: str) -> None:
    assert is_local(address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "host:1", "*:1", "unix-abstract:1", "host"])
def test_other_addresses_are_not_local(address: str) -> None:
    assert not is_local(address)
