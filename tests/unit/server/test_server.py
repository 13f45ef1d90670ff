"""The start of a server."""

from __future__ import annotations

import socket

import pytest

from bngrad_server.config import ServerConfig
from bngrad_server.errors import ListenError
from bngrad_server.memory import leases
from bngrad_server.server import Server


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
