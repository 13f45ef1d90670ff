"""What is said about addresses that others can reach."""

from __future__ import annotations

import pytest

from bngrad_server.security.exposure import is_local, warnings


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/a"])
def test_local_addresses_need_no_warning(address: str) -> None:
    assert is_local(address)
    assert not list(warnings([address], has_tls=False, knows_clients=False))


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "host:1", "*:1", "unix-abstract:1"])
def test_others_need_tls_and_to_know_their_clients(address: str) -> None:
    assert not is_local(address)
    assert not list(warnings([address], has_tls=True, knows_clients=True))
    (only_tls,) = warnings([address], has_tls=True, knows_clients=False)
    assert only_tls.startswith(f"{address} can be reached from other hosts, and whoever reaches it may call")
    (only_tokens,) = warnings([address], has_tls=False, knows_clients=True)
    assert only_tokens.startswith(f"{address} CAN BE REACHED FROM OTHER HOSTS WITHOUT TLS")
    assert "whoever" not in only_tokens
    (nothing,) = warnings([address], has_tls=False, knows_clients=False)
    assert "WITHOUT TLS" in nothing
    assert "whoever reaches it may call" in nothing


def test_each_address_is_told() -> None:
    assert len(list(warnings(["0.0.0.0:1", "unix:/a", "[::]:2"], has_tls=False, knows_clients=False))) == 2
