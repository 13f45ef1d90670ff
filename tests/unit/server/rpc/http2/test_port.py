"""The HTTP/2 port as a whole."""

from __future__ import annotations

import threading

from tests.unit.server.workers.additions import wait_until

from bngrad_server.config import ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.rpc.http2.port import Http2Port
from bngrad_server.rpc.servicer import Servicer
from bngrad_wire.limits import MAX_PROTOBUF_NBYTES, REGION_NBYTES


def test_a_port_that_was_not_started_leaves_no_thread() -> None:
    """As where a server cannot listen on another port."""
    engine = Engine(ServerConfig(arena_bytes=2**20, shared_bytes=REGION_NBYTES, front_bytes=0), lambda: None)
    before = set(threading.enumerate())
    port = Http2Port(Servicer(engine, MAX_PROTOBUF_NBYTES), {})
    assert port.listen_on_port("127.0.0.1", 0)
    assert not port.is_alive
    port.stop(0)
    engine.close()
    wait_until(lambda: set(threading.enumerate()) <= before)
