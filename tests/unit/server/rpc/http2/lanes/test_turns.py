"""How much of the event loop's time, and which threads, a connection with several calls may take from others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tests.raw_http2 import data, headers, prefixed
from tests.unit.server.rpc.http2.raw_client import Raw, check_sum, raw
from tests.unit.server.rpc.http2.service import PATH, REQUEST, Service
from tests.unit.server.workers.additions import TIMEOUT_S, inputs, request_of, wait_until

from bngrad_server.codec.ops import OPS
from bngrad_server.rpc.http2.limits import waste
from bngrad_server.rpc.other_calls import CHECK_PATH
from bngrad_server.rpc.servicer import EXCHANGE_PATH, SERVER_INFO_PATH
from bngrad_wire import messages
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.server import multiplexed
from bngrad_wire.http2.server.lane import Lane
from bngrad_wire.http2.server.multiplexed import MultiplexedConnection


@pytest.fixture
def client(service: Service) -> Raw:
    """A client that has made a call, so it may make several at a time."""
    client = raw(service)
    client.ask(1)
    check_sum(client.answer(1))
    return client


def whole_call(stream_id: int, path: str = PATH, extra: tuple[tuple[str, str], ...] = ()) -> bytes:
    message = REQUEST if path == PATH else b""
    return headers(path, stream_id, extra) + data(prefixed(message), stream_id, end=True)


def test_a_connection_has_few_and_short_turns_in_each_round(
    service: Service, client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, begun = Counter[int](), []
    read = MultiplexedConnection.read

    def noted(self: MultiplexedConnection) -> Any:
        rounds[service.port._event_loop.rounds] += 1
        found = read(self)
        begun.append(len(found[0]))
        return found

    monkeypatch.setattr(MultiplexedConnection, "read", noted)
    streams = range(3, 203, 2)
    client.send(*(whole_call(stream_id, CHECK_PATH) for stream_id in streams))
    for stream_id in streams:
        client.answer(stream_id)
    assert max(rounds.values()) <= 2  # one by its socket, and then one for what was left
    assert sum(begun) == len(streams)
    assert max(begun) <= multiplexed._CALLS_PER_TURN


@pytest.mark.parametrize("path", [CHECK_PATH, SERVER_INFO_PATH])
def test_a_call_that_is_no_op_has_no_thread_once_its_message_is_here(
    service: Service, client: Raw, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    lent: list[object] = []
    lend = service.port._connections.lend

    def noted(*arguments: Any) -> None:
        lent.append(arguments)
        lend(*arguments)

    monkeypatch.setattr(service.port._connections, "lend", noted)
    client.send(headers(path, 3))
    client.send(data(prefixed(b""), 3, end=True))
    client.answer(3)
    only = service.connect()
    call = only.call(path, timeout_s=TIMEOUT_S)
    call.send_message(b"", end=True)
    assert call.receive_message() is not None
    assert not lent


def test_a_flood_of_calls_that_are_no_op_is_paused_and_one_of_ops_is_not(
    service: Service, client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[object] = []
    monkeypatch.setattr(service.port._connections.readers, "pause", paused.append)
    monkeypatch.setattr(waste, "_ALLOWANCE_S", 0.0)
    monkeypatch.setattr(waste, "_ALLOWED_SHARE", 0.0)
    for stream_id in range(3, 43, 2):
        client.ask(stream_id)
        check_sum(client.answer(stream_id))
    assert not paused
    streams = range(43, 243, 2)
    client.send(*(whole_call(stream_id, CHECK_PATH) for stream_id in streams))
    for stream_id in streams:
        client.answer(stream_id)
    wait_until(lambda: len(paused) > 0)


@pytest.mark.parametrize("is_late", [False, True])
def test_calls_that_are_reset_as_they_arrive_count_as_cancelled_unless_they_are_late(
    service: Service, client: Raw, is_late: bool
) -> None:
    extra = (("grpc-timeout", "10m"),) if is_late else ()
    streams = range(3, 23, 2)
    client.send(*(whole_call(each, PATH, extra) + frames.rst_stream(each, ErrorCode.CANCEL) for each in streams))
    client.ask(23, path=CHECK_PATH, message=b"")
    client.answer(23)
    (connection,) = service.port._connections._all
    counted = service.port._calls._futile._cancelled.of(connection.client)
    assert counted == 0 if is_late else counted > len(streams) - 1


def test_a_thread_that_waits_for_a_call_is_not_woken_by_others(
    service: Service, client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[Lane] = []
    wake = Lane.wake

    def noted(self: Lane) -> None:
        woken.append(self)
        wake(self)

    monkeypatch.setattr(Lane, "wake", noted)
    header = request_of(inputs(), chunked=True).SerializeToString()
    client.send(headers(EXCHANGE_PATH, 3))
    client.send(data(prefixed(messages.field_prefix(OPS[0].exchange_number, len(header)) + header), 3))
    wait_until(lambda: len(service.port._connections.lent) == 1)
    (connection,) = service.port._connections._all
    lane = connection.lanes[3].lane
    wait_until(lambda: not lane._events)
    woken.clear()
    for stream_id in range(5, 45, 2):
        client.ask(stream_id)
        check_sum(client.answer(stream_id))
    assert lane not in woken
    client.send(frames.rst_stream(3, ErrorCode.CANCEL))
    wait_until(lambda: lane in woken)
