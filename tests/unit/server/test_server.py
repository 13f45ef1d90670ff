"""The start of a server."""

from __future__ import annotations

import grp
import socket

import pytest

from bngrad_server.config import ServerConfig
from bngrad_server.errors import ListenError, SettingError
from bngrad_server.memory import leases
from bngrad_server.server import Server, check_files


def test_a_group_to_share_memory_with_is_one_of_the_servers_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("os.getgroups", list)
    monkeypatch.setattr("os.getegid", lambda: grp.getgrnam("daemon").gr_gid)
    check_files(ServerConfig(shared_group="daemon"))
    with pytest.raises(SettingError, match="shared_group is 'adm'; the server's user should be in that group"):
        check_files(ServerConfig(shared_group="adm"))


def test_a_start_that_fails_leaves_no_files(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("s")  # the path of a socket must be short
    monkeypatch.setattr(leases, "PARENT", folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = f"127.0.0.1:{taken.getsockname()[1]}"
        config = ServerConfig(listen=(f"unix:{folder}/socket",), device="cpu", http=http)
        with pytest.raises(ListenError, match=f"cannot listen on {http}: Address already in use"):
            Server(config)
    assert list(folder.iterdir()) == []
