"""An engine behind the HTTP/2 port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.server.rpc.peers import Peer, new_peer


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with new_peer(tmp_path) as peer:
        yield peer
