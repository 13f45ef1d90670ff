"""The HTTP/2 port as a whole."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.unit.server.rpc.http2.service import Service
from tests.unit.server.workers.additions import TIMEOUT_S, wait_until

from bngrad_server.config import ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.http2 import port as http2_port
from bngrad_server.rpc.http2.port import Http2Port
from bngrad_server.rpc.servicer import Servicer
from bngrad_wire.limits import REGION_NBYTES


@pytest.fixture
def servicer() -> Iterator[Servicer]:
    config = ServerConfig(arena_bytes=2**20, shared_bytes=REGION_NBYTES, front_bytes=0)
    with closing(Engine(config, lambda: None)) as engine:
        yield Servicer(engine)


def test_a_port_that_was_not_started_leaves_no_thread(servicer: Servicer) -> None:
    """As where a server cannot listen on another port."""
    before = set(threading.enumerate())
    port = Http2Port(servicer, {}, Health(()))
    assert port.listen_on_port("127.0.0.1", 0)
    assert not port.is_alive
    port.stop(0)
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize(("computed_nbytes", "whole_nbytes"), [(0, 576 * 1024), (2**20, 2**20)])
def test_calls_that_the_event_loop_computes_are_expected_to_arrive_whole_and_to_take_long(
    servicer: Servicer, monkeypatch: pytest.MonkeyPatch, computed_nbytes: int, whole_nbytes: int
) -> None:
    monkeypatch.setattr(servicer.small_requests, "max_nbytes", computed_nbytes)
    port = Http2Port(servicer, {}, Health(()))
    assert port._calls._max_whole_nbytes == whole_nbytes
    assert port._connections.readers._has_long_calls == (computed_nbytes > 0)
    port.stop(0)


def test_a_port_is_alive_while_both_of_its_threads_are(service: Service) -> None:
    assert service.port.is_alive
    service.port._strangers.stop()
    assert service.port._event_loop.is_alive
    assert not service.port.is_alive


def test_it_accepts_connections_on_each_address_of_a_host(servicer: Servicer, monkeypatch: pytest.MonkeyPatch) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [each.getsockname() for each in listeners]
    monkeypatch.setattr(http2_port, "tcp_listeners", lambda host, port: listeners)
    port = Http2Port(servicer, {}, Health(()))
    assert port.listen_on_port("host", 0) in [number for _, number in addresses]
    port.start()
    for address in addresses:
        with socket.create_connection(address, TIMEOUT_S) as sock:
            assert sock.recv(1)  # its settings
    port.stop(0)


def test_what_is_computed_in_the_event_loop_and_the_load_follow_how_busy_that_is(servicer: Servicer) -> None:
    port = Http2Port(servicer, {}, Health(()))
    assert servicer.shared_requests.event_loop is servicer.load.event_loop is port._event_loop
    port.stop(0)
