"""Clients that take nothing of what there is for them."""

from __future__ import annotations

import time
from unittest import mock

import pytest

from bngrad_server.rpc.http2.limits import unsent
from bngrad_server.rpc.http2.limits.unsent import Unsent


@pytest.mark.parametrize(("pause_s", "is_overdue"), [(0.0, True), (60.0, False)])
def test_a_client_that_takes_nothing_is_overdue_but_for_a_time_in_which_the_server_was_stopped(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, is_overdue: bool
) -> None:
    monkeypatch.setattr(unsent, "_TIMEOUT_S", 0.05)
    connections = Unsent()
    connection = mock.Mock()
    connections.note(connection)
    time.sleep(0.1)
    connections.excuse(pause_s)
    assert list(connections.overdue()) == [connection] * is_overdue
