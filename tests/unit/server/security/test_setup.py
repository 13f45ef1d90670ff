"""Warnings about addresses that other hosts can reach, and the group that shares memory."""

from __future__ import annotations

import grp
from pathlib import Path

import pytest
from tests.security.authority import Authority

from bngrad_server.config import ServerConfig
from bngrad_server.errors import SettingError
from bngrad_server.security.setup import check_files, exposure_warnings, set_up, warn_of_http


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/a"])
def test_local_addresses_need_no_warning(address: str) -> None:
    assert not list(exposure_warnings([address], has_tls=False, knows_clients=False))


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "host:1", "*:1", "unix-abstract:1"])
def test_addresses_of_other_hosts_need_tls_and_known_clients(address: str) -> None:
    assert not list(exposure_warnings([address], has_tls=True, knows_clients=True))
    (only_tls,) = exposure_warnings([address], has_tls=True, knows_clients=False)
    assert only_tls.startswith(f"{address} can be reached from other hosts, and any client that reaches it may call")
    (only_tokens,) = exposure_warnings([address], has_tls=False, knows_clients=True)
    assert only_tokens.startswith(f"{address} CAN BE REACHED FROM OTHER HOSTS WITHOUT TLS")
    assert "any client" not in only_tokens
    (nothing,) = exposure_warnings([address], has_tls=False, knows_clients=False)
    assert "WITHOUT TLS" in nothing
    assert "any client that reaches it may call" in nothing


def test_each_address_has_its_warning() -> None:
    assert len(list(exposure_warnings(["0.0.0.0:1", "unix:/a", "[::]:2"], has_tls=False, knows_clients=False))) == 2


@pytest.mark.parametrize(
    ("address", "is_exposed"), [("0.0.0.0:9464", True), ("127.0.0.1:9464", False), ("[::1]:9464", False)]
)
def test_http_for_other_hosts_has_a_warning(
    caplog: pytest.LogCaptureFixture, address: str, *, is_exposed: bool
) -> None:
    warn_of_http(address)
    assert (f"{address}, the address of --http, can be reached from other hosts" in caplog.text) is is_exposed


def test_a_group_to_share_memory_with_is_one_of_the_servers_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("os.getgroups", list)
    monkeypatch.setattr("os.getegid", lambda: grp.getgrnam("daemon").gr_gid)
    check_files(ServerConfig(shared_group="daemon"))
    with pytest.raises(SettingError, match="shared_group is 'adm'; the server's user should be in that group"):
        check_files(ServerConfig(shared_group="adm"))


def test_root_may_share_memory_with_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.getgroups", list)
    monkeypatch.setattr("os.getegid", lambda: grp.getgrnam("daemon").gr_gid)
    check_files(ServerConfig(shared_group="adm"))


@pytest.mark.parametrize("insecure", [False, True])
def test_who_says_insecure_is_not_warned(caplog: pytest.LogCaptureFixture, *, insecure: bool) -> None:
    set_up(ServerConfig(listen=("0.0.0.0:1",), insecure=insecure), lambda: None)
    assert ("CAN BE REACHED FROM OTHER HOSTS" in caplog.text) is not insecure


def test_clients_are_known_by_their_certificates_where_those_are_checked(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    for client_ca in (None, authority.path):
        config = ServerConfig(tls_certificate=pair.certificate, tls_key=pair.key, tls_client_ca=client_ca)
        _, authenticator = set_up(config, lambda: None)
        assert authenticator.requires_certificate is (client_ca is not None)
