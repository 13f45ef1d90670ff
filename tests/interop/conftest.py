"""A real server, on TCP and on a Unix socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bngrad_cli.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    unix = f"unix:{tmp_path_factory.mktemp('socket') / 'bngrad.sock'}"
    with EmbeddedServer(options=("--listen", unix)) as server:
        yield {"tcp": server.target, "unix": unix}
