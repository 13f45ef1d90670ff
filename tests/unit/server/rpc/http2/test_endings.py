"""The last answers of connections that are to be closed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from tests.clock import Clock
from tests.unit.server.rpc.http2.service import Service, ask, check_answered, read_answer
from tests.unit.server.workers.additions import TIMEOUT_S, inputs, request_of, wait_until

from bngrad_server.rpc.http2 import endings
from bngrad_server.rpc.http2.endings import Deliveries
from bngrad_wire import http2
from bngrad_wire.http2 import frames

DELAY_S = 60.0


def answered_but_undelivered(service: Service) -> tuple[http2.ClientConnection, http2.ClientCall]:
    """A call that the server has answered, and whose client has room for a few KiB of the answer."""
    sock = service.socket(over_tcp=True, receive_nbytes=4096)
    connection = http2.ClientConnection(sock, "here")
    call = ask(connection, request_of(inputs(shape=(2, 32, 64, 16))).SerializeToString())
    wait_until(lambda: service.worker.batches == [1] and service.is_at_rest)
    return connection, call


def test_a_client_receives_its_last_answer_after_the_server_was_told_to_stop(service: Service) -> None:
    connection, call = answered_but_undelivered(service)
    with ThreadPoolExecutor(1) as thread:
        stopped = thread.submit(service.port.stop, TIMEOUT_S)
        wait([stopped], 0.3)
        wait_until(lambda: not service.port._connections.idle)
        (closing,) = service.port._connections.endings._deliveries
        assert not closing.is_watched
        connection.io.send([frames.frame(frames.PING, 0, 0, bytes(8))])  # a closed socket would answer with a reset
        assert len(read_answer(call).x_backprop.data) == 2**18
        stopped.result(TIMEOUT_S)
    assert service.port._connections.drained.is_set()
    assert not list(service.port._connections.endings._deliveries)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_client_that_does_not_receive_its_last_answer_does_not_keep_the_server(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.setattr(endings, "_TIMEOUT_S", DELAY_S if is_gone else 0.5)
    connection, _ = answered_but_undelivered(service)
    if is_gone:
        connection.close()
    service.port.stop(TIMEOUT_S)
    assert service.port._connections.drained.is_set()


def test_a_client_has_time_for_its_last_answer_while_it_receives_some_of_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the event loop looks late."""
    check_answered(ask(service.connect()))
    (connection,) = service.port._connections._all
    clock, deliveries, nbytes = Clock(), Deliveries(), iter([300, 200, 200, 100, 100, 100])
    monkeypatch.setattr(endings, "time", clock)
    monkeypatch.setattr(endings, "_undelivered_nbytes", lambda connection: next(nbytes))
    over = []
    for _ in range(6):
        over.append(deliveries.is_over(connection))
        clock.now += 3.0
    assert over == [False] * 5 + [True]
