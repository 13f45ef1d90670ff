"""Another thread may end a wait for the peer, which leaves the connection usable."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.unit.wire.http2.peers import TIMEOUT_S, in_thread, pair, unary

from bngrad_wire import http2
from bngrad_wire.http2 import ClientConnection, RpcError, ServerConnection

WAIT_S = 0.1


@pytest.fixture(params=["unix", "tcp"])
def connections(request: pytest.FixtureRequest) -> Iterator[tuple[ClientConnection, ServerConnection]]:
    near, far = pair(request.param)
    http2.set_timeout(far, WAIT_S)
    with closing(ClientConnection(near, "localhost")) as client, closing(ServerConnection(far)) as server:
        yield client, server


def test_an_interrupted_upload_ends_with_a_status_and_the_connection_serves_on(
    connections: tuple[ClientConnection, ServerConnection],
) -> None:
    client, server = connections
    server.io.waits = int(TIMEOUT_S / WAIT_S)

    def serve() -> None:
        call = server.accept()
        assert call is not None
        call.receive_message()
        began = time.monotonic()
        threading.Timer(2 * WAIT_S, server.io.interrupt).start()
        with pytest.raises(TimeoutError):
            call.receive_message()
        assert time.monotonic() - began < TIMEOUT_S / 2
        server.io.resume()
        call.end(8, "too slow")
        call = server.accept()
        assert call is not None
        size = call.receive_message()
        assert size is not None
        call.send_message(call.read(size))
        call.end()

    with in_thread(serve):
        call = client.call("/echo.Echo/echo")
        call.send_message(bytes(1000))  # and not the second one, for which the server waits
        with pytest.raises(RpcError, match="too slow"):
            call.receive_message()
        assert unary(client, b"again") == b"again"


@pytest.mark.parametrize("waits", [1, 2, 5])
def test_a_timeout_is_a_number_of_waits(connections: tuple[ClientConnection, ServerConnection], waits: int) -> None:
    _, server = connections
    server.io.waits = waits
    server.accept_nonblocking()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        server.accept()
    assert time.monotonic() - began >= waits * WAIT_S * 0.9
