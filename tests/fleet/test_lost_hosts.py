"""Hosts that vanish: packets are dropped, and nothing says that a connection has ended."""

from __future__ import annotations

import time

import pytest
from tests.fleet.process import calling
from tests.fleet.servers import PORT, serving
from tests.namespaces import Network
from tests.servers import Transport, wait_until

REPEATED_WITHIN_S = 20.0
"""Twice what it should take, and a third of the timeout of the calls."""


@pytest.mark.parametrize("is_received", [True, False], ids=["received", "unsent"])
@pytest.mark.parametrize("transport", ["unary", "stream"])
def test_calls_in_flight_are_repeated_elsewhere(network: Network, transport: Transport, is_received: bool) -> None:
    """The host that goes has acknowledged the calls, and will not answer; or it has not got them yet."""
    with serving(network, "first", "second") as (first, second):
        targets = [f"{each.address}:{PORT}" for each in (first, second)]
        with calling(network, *targets, transport=transport) as client:
            wait_until(lambda: min(client.shares(first, second)) > 0.1)
            if is_received:
                first.freeze()
                time.sleep(0.5)
            began = time.monotonic()
            first.vanish()
            try:
                client.wait_for_calls_that_hang()
                assert time.monotonic() - began < REPEATED_WITHIN_S
                assert not client.report()["errors"]
            finally:
                first.come_back()
                first.thaw()
            wait_until(lambda: min(client.shares(first, second)) > 0.1)
