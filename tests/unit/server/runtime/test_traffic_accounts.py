"""What a connection of the grpcio port was told."""

from __future__ import annotations

import pytest

from bngrad_server.runtime.traffic_accounts import Peer


@pytest.mark.parametrize("name", ["ipv4:127.0.0.1:50051", "ipv6:%5B::1%5D:50051"])
def test_a_tcp_connection_needs_each_report_once(name: str) -> None:
    first, second = object(), object()
    peer = Peer(name)
    assert [peer.needs(report) for report in (*[first] * 100, second, second)] == [True, *[False] * 99, True, False]


def test_answers_over_a_unix_socket_have_reports_for_the_connections_that_had_none() -> None:
    report = object()
    peer = Peer("unix:/run/bngrad.sock")
    assert peer.needs(report)
    assert 300 < sum(peer.needs(report) for _ in range(4000)) < 700  # 500, give or take ten standard deviations
