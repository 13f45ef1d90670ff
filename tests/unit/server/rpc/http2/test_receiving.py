"""Calls of the HTTP/2 port whose messages are received by threads, which clients share."""

from __future__ import annotations

import math
import threading
import time

import pytest
from tests.unit.server.rpc.http2.service import (
    DEADLINE_EXCEEDED,
    PATH,
    REQUEST,
    RESOURCE_EXHAUSTED,
    Service,
    code_of,
    half_made,
    receiving,
)
from tests.unit.server.workers.additions import wait_until

from bngrad_server.rpc.http2.receiving import ReceivingCalls


def test_half_made_messages_take_a_share_of_threads_and_are_answered_once_whole(service: Service) -> None:
    service.port._calls._receiving = ReceivingCalls(6)
    bad, rest = half_made(service, 10)
    wait_until(lambda: receiving(service) == 10)
    assert len(service.port._connections.lent) == 4
    (good,), _ = half_made(service, 1, "127.0.0.1")
    wait_until(lambda: receiving(service) == 11)
    good.sendall(rest)
    wait_until(lambda: service.worker.batches == [1])
    for each in reversed(bad):
        each.sendall(rest)
    wait_until(lambda: sum(service.worker.batches) == 11)
    wait_until(lambda: receiving(service) == 0)


def test_a_call_does_not_wait_for_a_thread_for_ever(service: Service) -> None:
    service.port._calls._receiving = ReceivingCalls(1, timeout_s=1.0)
    half_made(service, 1)
    wait_until(lambda: receiving(service) == 1)

    def code(timeout_s: float | None) -> int:
        call = service.connect(over_tcp=True).call(PATH, timeout_s=timeout_s)
        call.send_message(REQUEST, more=True)
        return code_of(call)

    assert code(0.5) == DEADLINE_EXCEEDED
    assert code(None) == RESOURCE_EXHAUSTED
    assert receiving(service) == 1


def test_a_call_of_a_client_at_its_limits_waits_without_a_thread_until_it_has_room(service: Service) -> None:
    full = {"here"}
    service.port._calls._receiving = ReceivingCalls(is_worthwhile=lambda client: not full)
    before = set(threading.enumerate())
    (waiting,), rest = half_made(service, 1)
    wait_until(lambda: receiving(service) == 1)
    waiting.sendall(rest)
    time.sleep(0.3)
    assert set(threading.enumerate()) == before
    full.clear()
    wait_until(lambda: service.worker.batches == [1])


def test_it_is_admission_that_says_which_client_is_at_its_limits_and_how_long_its_calls_may_wait(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission, waits = service.engine.admission, service.port._calls._receiving
    assert waits._max_wait_s == service.engine.max_wait_s
    waits._max_wait_s = 60.0
    monkeypatch.setattr(admission, "_max_client_bytes", 2**20)
    monkeypatch.setattr(admission, "_refused_of", {"127.0.0.2": (2**21, math.inf)})
    (waiting,), rest = half_made(service, 1)
    wait_until(lambda: receiving(service) == 1)
    assert not service.port._connections.lent
    assert waits.is_waited_for
    monkeypatch.setattr(admission, "_refused_of", {})
    waiting.sendall(rest)
    wait_until(lambda: service.worker.batches == [1])


def test_a_call_of_a_client_at_its_limits_is_refused_in_time(service: Service) -> None:
    service.port._calls._receiving = ReceivingCalls(is_worthwhile=lambda client: False, max_wait_s=0.3)
    call = service.connect(over_tcp=True).call(PATH)
    call.send_message(REQUEST, more=True)
    assert code_of(call) == RESOURCE_EXHAUSTED
    assert receiving(service) == 0


def test_a_call_that_waits_for_a_thread_does_not_delay_the_stop(service: Service) -> None:
    service.port._calls._receiving = ReceivingCalls(1)
    half_made(service, 3)
    wait_until(lambda: receiving(service) == 3)
    service.port.stop(0.1)
    assert service.port._connections.drained.is_set()
