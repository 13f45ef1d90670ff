"""An engine behind each of the ports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.server.rpc.peers import PORTS, Peer, peer_behind


@pytest.fixture(params=PORTS)
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peer]:
    with peer_behind(PORTS[request.param], tmp_path) as peer:
        yield peer
