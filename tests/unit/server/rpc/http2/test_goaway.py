"""How connections with several calls end when the server stops: without refusing what is on its way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.unit.server.rpc.http2.raw_client import Raw, check_sum, raw
from tests.unit.server.rpc.http2.service import Service
from tests.unit.server.workers.additions import TIMEOUT_S

from bngrad_server.rpc.http2 import endings
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode


@contextmanager
def stopping(service: Service) -> Iterator[Future[None]]:
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(service.port.stop, TIMEOUT_S)


def with_a_call(service: Service) -> Raw:
    client = raw(service)
    client.ask(1)
    check_sum(client.answer(1))
    return client


def last_stream_id(client: Raw) -> int:
    """The last stream that the next GOAWAY accepts."""
    return int.from_bytes(client.next(frames.GOAWAY, 0)[1][:4], "big")


def test_calls_on_their_way_when_the_server_stops_are_answered(service: Service) -> None:
    client = with_a_call(service)
    with stopping(service) as stopped:
        assert last_stream_id(client) == frames.MAX_STREAM_ID
        client.ask(3)  # before it has heard of the end
        check_sum(client.answer(3))
        assert not stopped.done()
        client.answer_ping()
        assert last_stream_id(client) == 3
        stopped.result(TIMEOUT_S)
    assert service.port._connections.drained.is_set()


def test_a_running_call_ends_after_its_client_has_heard_of_the_end(service: Service) -> None:
    client = with_a_call(service)
    service.worker.may_run.clear()
    client.ask(3)
    with stopping(service) as stopped:
        client.answer_ping()
        assert last_stream_id(client) == frames.MAX_STREAM_ID
        assert last_stream_id(client) == 3
        client.ask(5)
        assert client.code(frames.RST_STREAM, 5) == ErrorCode.REFUSED_STREAM
        service.worker.may_run.set()
        check_sum(client.answer(3))
        with pytest.raises(EOFError):
            client.next(frames.DATA, 3)
        stopped.result(TIMEOUT_S)


def test_a_client_that_never_answers_is_not_waited_for(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_GOAWAY_TIMEOUT_S", 0.1)
    client = with_a_call(service)
    began = time.monotonic()
    with stopping(service) as stopped:
        stopped.result(TIMEOUT_S)
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert [last_stream_id(client) for _ in range(2)] == [frames.MAX_STREAM_ID, 1]
    with pytest.raises(EOFError):
        client.next(frames.DATA, 1)
