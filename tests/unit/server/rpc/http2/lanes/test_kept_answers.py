"""Answers for which their clients have no room: kept without a thread up to a bound, and lost in no other case."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.raw_http2 import data, headers, prefixed
from tests.unit.server.rpc.http2.raw_client import Raw, check_sum, raw
from tests.unit.server.rpc.http2.service import PATH, REQUEST, Service, check_works, look_between_events
from tests.unit.server.workers.additions import TIMEOUT_S, wait_until

from bngrad_server.rpc.http2.connections import Http2Connections
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.server import outbound

ANSWERS = 3
"""For how many a client has no room."""
NO_WINDOWS = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0})
STREAMS = range(3, 3 + 2 * ANSWERS, 2)


class Kept:
    """A service, and a client that has made a call, and now opens no windows by itself."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service = service
        self.connections: Http2Connections = service.port._connections
        self.free_nbytes = self.connections.lanes.answers.free_nbytes
        self.client = raw(service, NO_WINDOWS)
        self.client.ask(1)
        self.client.send(frames.window_update(1, 2**16))
        self.answer_nbytes = len(prefixed(self.client.answer(1)))
        (self.connection,) = self.connections._all
        wait_until(lambda: service.is_at_rest and not self.connection.lanes)
        self.lent: list[object] = []
        monkeypatch.setattr(self.connections, "lend", self._noted(self.connections.lend))

    def _noted(self, lend: Callable[..., None]) -> Callable[..., None]:
        def noted(caller: object, action: Callable[[], None]) -> None:
            self.lent.append(caller)
            lend(caller, action)

        return noted

    def ask(self) -> None:
        """Makes calls, and waits until all are computed, and nothing of them is in the arena."""
        for stream_id in STREAMS:
            self.client.ask(stream_id)
        wait_until(lambda: self.connection.http.unsent_nbytes >= ANSWERS * self.answer_nbytes)
        look_between_events(self.service)

    @property
    def leaves_nothing(self) -> bool:
        return (
            self.connections.lanes.answers.free_nbytes == self.free_nbytes
            and not self.connections.lanes.undelivered
            and not self.connection.lanes
            and self.service.is_at_rest
        )


@pytest.fixture
def kept(service: Service, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(service, monkeypatch)


def take(client: Raw, *streams: int) -> None:
    """Opens the windows of calls, and receives their answers."""
    for stream_id in streams:
        client.send(frames.window_update(stream_id, 2**16))
        check_sum(client.answer(stream_id))


def test_they_take_no_thread_and_no_memory_of_the_arena(kept: Kept) -> None:
    kept.ask()
    assert not kept.lent
    assert kept.service.is_at_rest
    assert kept.connections.lanes.answers.free_nbytes < kept.free_nbytes
    assert kept.connection not in kept.connections.idle
    take(kept.client, *reversed(STREAMS))
    wait_until(lambda: kept.leaves_nothing)
    assert kept.connection in kept.connections.idle


def test_a_call_whose_answer_is_kept_counts_as_arrived(kept: Kept) -> None:
    uploads, message = kept.connections.lanes.uploads, prefixed(REQUEST)
    kept.client.send(headers(PATH, 3), data(message[:100], 3))
    wait_until(lambda: uploads.count == 1)
    kept.client.send(data(message[100:], 3, end=True))
    wait_until(lambda: len(kept.connections.lanes.undelivered) == 1)
    assert uploads.count == 0
    take(kept.client, 3)
    wait_until(lambda: kept.leaves_nothing)
    assert uploads.count == 0


def test_where_clients_have_limits_they_count_and_none_is_kept(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.service.engine.admission, "limits_clients", True)
    for stream_id in STREAMS:
        kept.client.ask(stream_id)
    wait_until(lambda: len(kept.lent) == ANSWERS)
    assert kept.service.engine.admission.admitted == ANSWERS
    take(kept.client, *STREAMS)
    wait_until(lambda: kept.leaves_nothing)


@pytest.mark.parametrize("of", ["a connection", "all connections"])
def test_beyond_a_bound_they_wait_in_threads(kept: Kept, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    most = (ANSWERS - 1) * kept.answer_nbytes + kept.answer_nbytes // 2
    if of == "a connection":
        monkeypatch.setattr(outbound, "_MOST_KEPT_NBYTES", most)
    else:
        kept.connections.lanes.answers.free_nbytes = kept.free_nbytes = most
    for stream_id in STREAMS:
        kept.client.ask(stream_id)
    wait_until(lambda: len(kept.lent) == 1)
    take(kept.client, *STREAMS)
    wait_until(lambda: kept.leaves_nothing)
    assert len(kept.lent) == 1


def test_a_window_that_opens_in_part_takes_a_part(kept: Kept) -> None:
    kept.ask()
    first, *others = STREAMS
    kept.client.send(frames.window_update(first, 10))
    assert len(kept.client.next(frames.DATA, first)[1]) == 10
    assert not kept.client.has_received(frames.DATA, first)
    take(kept.client, *others)
    kept.client.send(frames.window_update(first, 2**16))
    assert len(kept.client.next(frames.DATA, first)[1]) == kept.answer_nbytes - 10
    assert kept.client.next(frames.HEADERS, first)
    assert kept.client.status(first) == 0
    wait_until(lambda: kept.leaves_nothing)


def test_one_that_its_client_no_longer_wants_is_dropped(kept: Kept) -> None:
    kept.ask()
    first, *others = STREAMS
    kept.client.send(frames.rst_stream(first, ErrorCode.CANCEL))
    wait_until(lambda: len(kept.connections.lanes.undelivered) == len(others))
    take(kept.client, *others)
    wait_until(lambda: kept.leaves_nothing)


def test_a_connection_that_is_lost_leaves_none(kept: Kept) -> None:
    kept.ask()
    kept.client.close()
    wait_until(lambda: len(kept.connections) == 0 and kept.leaves_nothing)
    check_works(kept.service)


def test_a_server_that_stops_sends_them_first(kept: Kept) -> None:
    kept.ask()
    with ThreadPoolExecutor(1) as thread:
        stopped = thread.submit(kept.service.port.stop, TIMEOUT_S)
        assert kept.client.code(frames.GOAWAY, 0) == ErrorCode.NO_ERROR
        take(kept.client, *STREAMS)
        stopped.result(TIMEOUT_S)
    assert kept.leaves_nothing
