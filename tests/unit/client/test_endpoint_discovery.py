"""A server's endpoints, as calls that lose some and a client that closes find them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.servers import wait_until
from tests.unit.client.endpoints import SECONDS, Server

from bngrad._credentials import NO_CREDENTIALS
from bngrad._deadline import ENDLESS, Cancellation, Deadline
from bngrad._errors import ClientClosedError
from bngrad._transports.endpoints import EndpointDiscovery, Endpoints
from bngrad._transports.server_state import ServerState
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb


@pytest.fixture
def discovery(served: Server) -> Iterator[EndpointDiscovery]:
    with closing(EndpointDiscovery(served.target, NO_CREDENTIALS, ServerState())) as made:
        yield made


def test_an_endpoint_that_two_calls_lose_is_asked_for_once(served: Server, discovery: EndpointDiscovery) -> None:
    asked = []

    def ask(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        asked.append(1)
        return served.endpoints

    def found() -> Endpoints:
        return discovery.endpoints(ask, ENDLESS, Cancellation())

    first = found()
    assert first.unix is not None
    discovery.lose(first, first.unix)
    second = found()
    assert (second.unix, second.tcp) == (None, first.tcp)
    discovery.lose(first, first.unix)
    assert found() is second
    assert len(asked) == 2


def test_endpoints_that_are_found_as_the_client_closes_are_closed(served: Server, discovery: EndpointDiscovery) -> None:
    def ask(deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        discovery.close()
        return served.endpoints

    with pytest.raises(ClientClosedError) as raised:
        discovery.endpoints(ask, ENDLESS, Cancellation())
    # Sooner than the server ends a connection without calls.
    wait_until(lambda: [sock.fileno() for sock in served.local._sockets] == [-1], SECONDS / 2)
    assert raised.tb is not None  # which refers to them
