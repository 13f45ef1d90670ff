"""A name with several addresses: each must present the certificate of the name."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from tests.security.conftest import Guarded, ask
from tests.servers import free_port

import bngrad

_ADDRESSES = ("127.0.0.1", "127.0.0.2")
_NAME = "gpu.example"


@pytest.fixture
def _several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the name server."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: Any, *options: Any, **names: Any) -> Any:
        if host != _NAME:
            return real(host, port, *options, **names)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0)) for address in _ADDRESSES]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.usefixtures("_several_addresses")
def test_each_address_must_have_the_certificate_of_the_name(tmp_path: Path) -> None:
    port = free_port(*_ADDRESSES)
    listen = [word for address in _ADDRESSES for word in ("--listen", f"{address}:{port}")]
    guarded = Guarded(tmp_path, options=tuple(listen))
    guarded.show(guarded.authority.issue(_NAME))
    with guarded.running():
        for transport in ("unary", "stream"):
            with guarded.client(f"{_NAME}:{port}", transport=transport) as client:
                for _ in range(8):
                    ask(client)
        with guarded.client(f"{_ADDRESSES[0]}:{port}", retries=False) as client, pytest.raises(bngrad.UnavailableError):
            ask(client)
