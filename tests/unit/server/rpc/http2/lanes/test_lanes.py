"""Several calls at a time on a connection, as every client but our own makes them."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from tests.raw_http2 import data, headers, prefixed
from tests.unit.server.rpc.http2.raw_client import Raw, check_sum, increments, raw
from tests.unit.server.rpc.http2.service import (
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    PATH,
    REQUEST,
    RESOURCE_EXHAUSTED,
    Service,
    check_works,
    look_between_events,
)
from tests.unit.server.workers.additions import TIMEOUT_S, check_answer, inputs, request_of, wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_server.codec import short_chunks
from bngrad_server.codec.ops import OPS
from bngrad_server.memory import transfer_watchdog
from bngrad_server.rpc.http2.handlers import Http2Handler
from bngrad_server.rpc.http2.lanes import watches
from bngrad_server.rpc.http2.limits import unsent, waste
from bngrad_server.rpc.other_calls import WATCH_PATH
from bngrad_server.rpc.servicer import EXCHANGE_PATH
from bngrad_wire import messages
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.header_block import encode
from bngrad_wire.http2.server.call import WHOLE_NBYTES
from bngrad_wire.http2.server.multiplexed import MultiplexedConnection

CHECK_PATH = "/grpc.health.v1.Health/Check"
CHECK = health_pb2.HealthCheckRequest()
CHECK_STATUS = health_pb2.HealthCheckResponse
REFUSED, CALM, FLOW = ErrorCode.REFUSED_STREAM, ErrorCode.ENHANCE_YOUR_CALM, ErrorCode.FLOW_CONTROL_ERROR


@contextmanager
def stub(service: Service) -> Iterator[pb_grpc.BatchNormGradServiceStub]:
    with grpc.insecure_channel(f"unix:{service._path}") as channel:
        yield pb_grpc.BatchNormGradServiceStub(channel)


def running(service: Service, count: int = 1) -> tuple[Raw, list[int]]:
    """A client with calls that are computed until the worker may run; the numbers of their streams."""
    service.worker.may_run.clear()
    client = raw(service)
    streams = list(range(1, 2 * count, 2))
    for stream_id in streams:
        client.ask(stream_id)
    wait_until(lambda: service.engine.admission.admitted == count)
    return client, streams


def test_a_call_does_not_wait_for_one_before_it(service: Service) -> None:
    client, (first,) = running(service)
    client.ask(3, path=CHECK_PATH, message=b"")
    client.answer(3)
    service.worker.may_run.set()
    check_sum(client.answer(first))


def test_each_of_many_calls_has_its_own_answer(service: Service) -> None:
    def ask(seed: int) -> None:
        answer = requests.FusedBatchNormGradV3(request_of(inputs(seed)), timeout=TIMEOUT_S)
        check_answer(answer, answer.x_backprop.data, inputs(seed))

    with stub(service) as requests, ThreadPoolExecutor(24) as threads:
        list(threads.map(ask, range(300)))
    assert len(service.port._connections) == 1


def test_unary_calls_and_exchanges_share_a_connection(service: Service) -> None:
    arrays = inputs()
    parts = [
        pb.ExchangeRequest(fused_batch_norm_grad_v3=request_of(arrays, chunked=True)),
        *(pb.ExchangeRequest(chunk=arrays[name].tobytes()) for name in ("y_backprop", "x")),
    ]

    def exchange(_: int) -> None:
        head, *chunks = requests.Exchange(iter(parts), timeout=TIMEOUT_S)
        check_answer(head.fused_batch_norm_grad_v3, b"".join(each.chunk for each in chunks), arrays)

    def ask(_: int) -> None:
        answer = requests.FusedBatchNormGradV3(request_of(arrays), timeout=TIMEOUT_S)
        check_answer(answer, answer.x_backprop.data, arrays)

    with stub(service) as requests, ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(call, 0) for _ in range(20) for call in (ask, exchange)]
        for each in calls:
            each.result()


def test_large_messages_go_both_ways_beside_each_other(service: Service) -> None:
    shape = (16, 40, 40, 3)

    def ask(seed: int) -> None:
        arrays = inputs(seed, shape)
        answer = requests.FusedBatchNormGradV3(request_of(arrays), timeout=TIMEOUT_S)
        np.testing.assert_array_equal(
            np.frombuffer(answer.x_backprop.data, np.float32), (arrays["x"] + arrays["y_backprop"]).ravel()
        )

    with stub(service) as requests, ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(12)))


def test_a_call_may_arrive_byte_by_byte(service: Service) -> None:
    client = raw(service)
    client.ask(1)  # by itself: a client that has made no call yet may not cost as much time
    check_sum(client.answer(1))
    for byte in headers(PATH, 3) + data(prefixed(REQUEST), 3, end=True):
        client.send(bytes([byte]))
    check_sum(client.answer(3))
    for stream_id in (5, 7):  # interleaved
        client.send(headers(PATH, stream_id))
    message = prefixed(REQUEST)
    for start in range(0, len(message), 100):
        for stream_id in (5, 7):
            client.send(data(message[start : start + 100], stream_id, end=start + 100 >= len(message)))
    check_sum(client.answer(5))
    check_sum(client.answer(7))


def test_a_client_may_end_its_message_by_trailers(service: Service) -> None:
    client = raw(service)
    for stream_id in (1, 3):
        trailers = frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream_id, b"\0\1a\1b")
        client.send(headers(PATH, stream_id), data(prefixed(REQUEST), stream_id), trailers)
        check_sum(client.answer(stream_id))


def test_a_cancelled_call_frees_its_memory_and_leaves_others_alone(service: Service) -> None:
    client, (first, second) = running(service, 2)
    client.send(frames.rst_stream(first, ErrorCode.CANCEL))
    (connection,) = service.port._connections._all
    wait_until(lambda: list(connection.lanes) == [second])
    service.worker.may_run.set()
    check_sum(client.answer(second))
    wait_until(lambda: service.is_at_rest)


def test_what_was_received_of_a_connection_that_is_lost_is_read_no_further(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_chunks, "_REST", 500)
    header = request_of(inputs(shape=(10, 50, 50, 3)), chunked=True).SerializeToString()
    chunk = prefixed(messages.field_prefix(pb.ExchangeRequest.CHUNK_FIELD_NUMBER, 4) + bytes(4))
    client = raw(service)
    client.send(headers(EXCHANGE_PATH, 1))
    client.send(data(prefixed(messages.field_prefix(OPS[0].exchange_number, len(header)) + header), 1))
    for _ in range(15):
        client.send(data(chunk * 1000, 1))
    wait_until(lambda: len(service.port._connections.lent) == 1)
    (connection,) = service.port._connections._all
    wait_until(lambda: connection.lanes[1].lane.unread > 100_000)
    client.close()
    wait_until(lambda: not service.port._connections.lent and service.is_at_rest)


@pytest.mark.parametrize("part", ["headers", "a part of the message", "the message"])
def test_a_connection_that_is_lost_leaves_nothing(service: Service, part: str) -> None:
    service.worker.may_run.clear()
    client = raw(service)
    for stream_id in (1, 3, 5):
        client.send(headers(PATH, stream_id))
        if part != "headers":
            message = prefixed(REQUEST)[: None if part == "the message" else 100]
            client.send(data(message, stream_id, end=part == "the message"))
    wait_until(lambda: len(service.port._connections) == 1)
    look_between_events(service)
    client.close()
    wait_until(lambda: len(service.port._connections) == 0)
    service.worker.may_run.set()
    wait_until(lambda: service.is_at_rest and not service.port._connections.lent)
    check_works(service)


def test_an_answer_waits_for_the_window_of_its_stream_and_others_do_not(service: Service) -> None:
    client = raw(service, frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    for stream_id in (1, 3):
        client.ask(stream_id)
    client.send(frames.window_update(3, 2000))
    check_sum(client.answer(3))
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))
    assert len(client.next(frames.DATA, 1)[1]) == 100
    client.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 10}))  # less than was sent
    client.send(frames.window_update(1, 40))
    look_between_events(service)
    assert not client.has_received(frames.DATA, 1)
    client.send(frames.window_update(1, 2000))
    assert client.next(frames.DATA, 1)
    assert client.next(frames.HEADERS, 1)
    assert client.status(1) == 0


def test_an_answer_waits_for_the_window_of_the_connection(service: Service) -> None:
    client = raw(service, frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}))
    client.ask(1)
    nbytes = len(prefixed(client.answer(1)))
    count = frames.DEFAULT_WINDOW // nbytes
    streams = range(3, 2 * count + 2, 2)
    for stream_id in streams:
        client.ask(stream_id)
    for stream_id in streams[:-1]:
        client.answer(stream_id)
    (connection,) = service.port._connections._all
    wait_until(lambda: connection.http.has_unsent and connection.http.send_window == 0)
    look_between_events(service)
    assert connection.interest == (True, False)  # it is writable all the time
    client.send(frames.window_update(0, nbytes))
    check_sum(client.answer(streams[-1]))


def test_more_calls_than_announced_are_refused(service: Service) -> None:
    client = raw(service)
    client.ask(1)
    client.answer(1)
    assert struct.pack(">HI", frames.MAX_CONCURRENT_STREAMS, 100) in client.next(frames.SETTINGS, 0)[1] + b"".join(
        payload for kind, _, _, payload in client._received if kind == frames.SETTINGS
    )
    streams = range(3, 3 + 2 * 101, 2)
    for stream_id in streams:
        client.send(headers(PATH, stream_id))
    assert client.code(frames.RST_STREAM, streams[-1]) == REFUSED
    for stream_id in streams[:2]:
        client.send(data(prefixed(REQUEST), stream_id, end=True))
        check_sum(client.answer(stream_id))


def test_calls_that_a_client_has_reset_leave_room_for_others_at_once(service: Service) -> None:
    client = raw(service)
    client.ask(1)
    client.answer(1)
    streams, others = range(3, 203, 2), range(203, 403, 2)
    client.send(*(headers(PATH, stream_id) for stream_id in streams))
    for first, second in zip(streams, others, strict=True):
        client.send(frames.rst_stream(first, ErrorCode.CANCEL), headers(PATH, second))
    client.send(data(prefixed(REQUEST), others[-1], end=True))
    check_sum(client.answer(others[-1]))
    client.has_received(frames.RST_STREAM, others[0])
    assert not {on for kind, _, on, _ in client._received if kind == frames.RST_STREAM} & set(others)


@pytest.mark.parametrize(("error", "code"), [(MemoryError, CALM), (LookupError, ErrorCode.INTERNAL_ERROR)])
def test_a_call_that_cannot_even_be_refused_is_reset_and_leaves_the_connection_to_others(
    service: Service, monkeypatch: pytest.MonkeyPatch, error: type[Exception], code: ErrorCode
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(Http2Handler, "handle", fail)
    client = raw(service)
    client.send(headers(EXCHANGE_PATH, 1))
    assert client.code(frames.RST_STREAM, 1) == code
    client.ask(3)
    check_sum(client.answer(3))


@pytest.mark.parametrize("over", [0, 1])
def test_a_client_keeps_to_the_window_of_a_call_that_nothing_reads(service: Service, over: int) -> None:
    client = raw(service)
    client.ask(1)
    client.answer(1)
    service.port._calls._receiving._shares._free = 0  # no thread reads it
    client.send(headers(PATH, 3))
    left = WHOLE_NBYTES + over
    while left:
        part = min(left, frames.MIN_FRAME_SIZE)
        client.send(data(bytes(part), 3))
        left -= part
    if over:
        assert client.code(frames.GOAWAY, 0) == FLOW
    else:
        client.ask(5)
        check_sum(client.answer(5))
    client.close()


def test_a_flood_of_calls_that_are_reset_ends_its_connection(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waste, "_ALLOWANCE_S", TIMEOUT_S)  # it is not paused before
    client = raw(service)
    client.ask(1)
    client.answer(1)
    with suppress(ConnectionError):
        for stream_id in range(3, 10_000, 2):
            client.send(headers(PATH, stream_id), frames.rst_stream(stream_id, ErrorCode.CANCEL))
    assert client.code(frames.GOAWAY, 0) == CALM
    check_works(service)


def test_a_call_that_is_longer_than_it_says_is_reset_alone(service: Service) -> None:
    client, (first,) = running(service)
    parts = [data(bytes(10), 3)] * 3  # all but the first come after the reset
    client.send(headers(PATH, 3, [("content-length", "5")]), *parts)
    assert client.code(frames.RST_STREAM, 3) == ErrorCode.PROTOCOL_ERROR
    service.worker.may_run.set()
    check_sum(client.answer(first))


def test_a_request_that_is_no_call_is_answered_beside_calls(service: Service) -> None:
    client, (first,) = running(service)
    get = encode([(":method", "GET"), (":scheme", "http"), (":path", "/")])
    client.send(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 3, get))
    assert b"415" in client.next(frames.HEADERS, 3)[1]
    assert b"gRPC" in client.next(frames.DATA, 3)[1]
    service.worker.may_run.set()
    check_sum(client.answer(first))


def test_headers_say_that_the_table_is_not_used_once_a_client_makes_it_smaller(service: Service) -> None:
    client = raw(service)
    client.ask(1)
    client.answer(1)
    client.send(frames.settings({frames.HEADER_TABLE_SIZE: 0}))
    for stream_id in (3, 5):
        client.ask(stream_id)
        for _ in range(2):
            assert client.next(frames.HEADERS, stream_id)[1][:1] == b"\x20"


def test_a_slow_upload_is_refused_and_other_calls_go_on(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.engine.transfers, "_timeout_s", 1.0)
    client = raw(service)
    client.send(headers(PATH, 1), data(prefixed(bytes(50_000))[: frames.MIN_FRAME_SIZE], 1))
    client.ask(3)
    check_sum(client.answer(3))
    assert client.code(frames.RST_STREAM, 1) == CALM
    client.ask(5)
    check_sum(client.answer(5))
    wait_until(lambda: service.is_at_rest and not service.port._connections.lent)


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("is_dripped", [True, False])
def test_a_client_that_does_not_take_an_answer_in_time_loses_that_call_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_kept: bool, is_dripped: bool
) -> None:
    if is_kept:
        monkeypatch.setattr(service.servicer.transfers, "_timeout_s", 0.5)
    else:
        service.port._connections.lanes.answers.free_nbytes = 0
        monkeypatch.setattr(transfer_watchdog, "_WINDOW_S", 0.5)
    client = raw(service, frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    client.ask(1)
    until = time.monotonic() + TIMEOUT_S
    while is_dripped and not client.has_received(frames.RST_STREAM, 1):
        assert time.monotonic() < until
        client.send(frames.window_update(1, 1))
        time.sleep(0.02)
    assert client.code(frames.RST_STREAM, 1) == CALM
    client.ask(3)
    client.send(frames.window_update(3, 2000))
    check_sum(client.answer(3))
    wait_until(lambda: service.is_at_rest and not service.port._connections.lent)


def test_a_client_that_reads_nothing_is_closed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsent, "_TIMEOUT_S", 0.5)
    client = Raw(service.socket(over_tcp=True, receive_nbytes=1))
    service._opened.append(client)
    client.ask(1)
    client.answer(1)
    (connection,) = service.port._connections._all
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    numbers = itertools.count(3, 2)

    def is_closed() -> bool:
        with suppress(BlockingIOError, ConnectionError):
            client.sock.settimeout(0)
            client.ask(next(numbers), path="/unknown")
        return len(service.port._connections) == 0

    wait_until(is_closed)
    check_works(service)


def fill(client: Raw, stream_id: int, nbytes: int) -> None:
    """Sends the beginning of a call that has a message of 150 KB."""
    client.send(headers(PATH, stream_id))
    message = prefixed(request_of(inputs(shape=(1, 80, 80, 3))).SerializeToString())[:nbytes]
    for start in range(0, nbytes, frames.MIN_FRAME_SIZE):
        client.send(data(message[start : start + frames.MIN_FRAME_SIZE], stream_id))


def test_calls_that_nothing_reads_leave_room_for_all_others(service: Service) -> None:
    client = raw(service)
    client.ask(1)
    client.answer(1)
    service.port._calls._receiving._shares._free = 0  # no thread reads them
    for stream_id in range(3, 201, 2):
        fill(client, stream_id, WHOLE_NBYTES)
    client.ask(201)
    check_sum(client.answer(201))
    client.close()


def test_while_many_calls_have_not_arrived_a_connection_has_one_at_a_time(service: Service) -> None:
    service.port._connections.lanes.uploads.most = 2
    client = raw(service)
    client.ask(1)
    client.answer(1)
    for stream_id in (3, 5):
        client.send(headers(PATH, stream_id))
    for each, stream_id, is_refused in ((client, 7, True), (raw(service), 1, False)):
        each.ask(stream_id)
        if is_refused:
            assert each.code(frames.RST_STREAM, stream_id) == REFUSED
        else:
            check_sum(each.answer(stream_id))
    client.send(data(prefixed(REQUEST), 3, end=True), frames.rst_stream(5, ErrorCode.CANCEL))
    check_sum(client.answer(3))
    wait_until(lambda: service.port._connections.lanes.uploads.count == 0)
    client.send(headers(PATH, 9))
    client.ask(11)
    check_sum(client.answer(11))
    assert service.port._connections.lanes.uploads.count == 1
    client.close()
    wait_until(lambda: service.port._connections.lanes.uploads.count == 0)


def test_one_window_of_a_connection_grows(service: Service) -> None:
    client = raw(service)
    client.ask(1)
    client.answer(1)
    streams = range(3, 11, 2)
    for stream_id in streams:
        fill(client, stream_id, frames.DEFAULT_WINDOW)
    grown = [0] * len(streams)

    def have_read() -> bool:
        for i, stream_id in enumerate(streams):
            grown[i] += increments(client, stream_id)
        return min(grown) > 0

    wait_until(have_read)
    assert sum(each > 2**20 for each in grown) == 1
    client.close()


def test_a_long_upload_may_arrive_in_pieces_that_end_amid_frames(service: Service) -> None:
    client = raw(service)
    client.ask(1)
    client.answer(1)
    (connection,) = service.port._connections._all
    amid_frame = service.port._connections.readers.amid_frame
    frame = data(bytes(100), 3)
    client.send(headers(PATH, 3), data(prefixed(bytes(50_000))[:100], 3), frame[:5])
    wait_until(lambda: connection in amid_frame)
    since = amid_frame[connection]
    client.send(frame[5:], frame[:5])
    wait_until(lambda: amid_frame.get(connection, 0) > since)
    since = amid_frame[connection]
    client.send(frame[5:6])
    look_between_events(service)
    look_between_events(service)
    assert amid_frame[connection] == since


def test_a_client_that_only_reads_gets_all_of_an_answer(service: Service) -> None:
    windows = frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}), frames.window_update(0, 2**30)
    service.worker.may_run.clear()
    client = raw(service, frames.PREFACE + b"".join(windows))
    arrays = inputs(shape=(16, 40, 40, 3))
    message = prefixed(request_of(arrays).SerializeToString())
    parts = [message[start : start + frames.MIN_FRAME_SIZE] for start in range(0, len(message), frames.MIN_FRAME_SIZE)]
    client.send(headers(PATH, 1), *(data(part, 1) for part in parts), data(b"", 1, end=True))
    wait_until(lambda: service.engine.admission.admitted == 1)
    (connection,) = service.port._connections._all
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    service.worker.may_run.set()
    wait_until(lambda: connection.http.is_cut)
    look_between_events(service)
    answer = pb.FusedBatchNormGradV3Response.FromString(client.answer(1))
    np.testing.assert_array_equal(
        np.frombuffer(answer.x_backprop.data, np.float32), (arrays["x"] + arrays["y_backprop"]).ravel()
    )


def test_a_client_that_takes_an_answer_bit_by_bit_wastes_no_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = raw(service, frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 300}))
    client.ask(1)
    received = client.next(frames.DATA, 1)[1]
    paused: list[object] = []
    monkeypatch.setattr(service.port._connections.readers, "pause", paused.append)
    monkeypatch.setattr(waste, "_ALLOWANCE_S", 0)
    monkeypatch.setattr(waste, "_ALLOWED_SHARE", 0)
    look_between_events(service)
    while len(received) < 5 + struct.unpack(">I", received[1:5])[0]:
        client.send(frames.window_update(1, 300))
        received += client.next(frames.DATA, 1)[1]
    assert client.next(frames.HEADERS, 1)
    assert client.status(1) == 0
    assert not paused
    for _ in range(2):  # the first comes with the last bit
        client.send(frames.frame(frames.PING, 0, 0, bytes(8)))
        client.next(frames.PING, 0)
    look_between_events(service)
    assert paused


def test_the_connection_ends_when_its_last_call_is_cancelled_while_the_server_stops(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    client, (first,) = running(service)
    with ThreadPoolExecutor(1) as thread:
        stopped = thread.submit(service.port.stop, TIMEOUT_S)
        assert client.code(frames.GOAWAY, 0) == ErrorCode.NO_ERROR
        client.answer_ping()
        client.send(frames.rst_stream(first, ErrorCode.CANCEL))
        stopped.result(TIMEOUT_S)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def watch(client: Raw, stream_id: int) -> int:
    """The next status that is reported."""
    message = client.next(frames.DATA, stream_id)[1]
    return health_pb2.HealthCheckResponse.FromString(message[5:]).status


def test_health_is_watched_until_the_server_stops(service: Service) -> None:
    client = raw(service)
    streams = (1, 3, 5)
    for stream_id in streams:
        client.ask(stream_id, CHECK.SerializeToString(), WATCH_PATH)
        assert watch(client, stream_id) == CHECK_STATUS.NOT_SERVING
    client.send(frames.rst_stream(5, ErrorCode.CANCEL))
    for is_serving in (True, False, True):
        service.health.update(lambda is_serving=is_serving: is_serving)  # type: ignore[misc]
        for stream_id in streams[:2]:
            assert watch(client, stream_id) == (CHECK_STATUS.SERVING if is_serving else CHECK_STATUS.NOT_SERVING)
    client.ask(7)
    check_sum(client.answer(7))
    (connection,) = service.port._connections._all
    wait_until(lambda: list(connection.lanes) == [1, 3])
    service.health.close()
    for stream_id in streams[:2]:
        assert watch(client, stream_id) == CHECK_STATUS.NOT_SERVING
        assert client.next(frames.HEADERS, stream_id)
        assert client.status(stream_id) == 0
    wait_until(lambda: connection in service.port._connections.idle)


def test_an_unknown_service_is_watched_too(service: Service) -> None:
    client = raw(service)
    client.ask(1, health_pb2.HealthCheckRequest(service="other").SerializeToString(), WATCH_PATH)
    assert watch(client, 1) == CHECK_STATUS.SERVICE_UNKNOWN


def test_what_a_client_has_no_room_for_is_reported_later(service: Service) -> None:
    client = raw(service, frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    client.ask(1, CHECK.SerializeToString(), WATCH_PATH)
    for _ in range(3):
        service.health.update(lambda: True)
        service.health.update(lambda: False)
    service.health.update(lambda: True)
    client.send(frames.window_update(1, 1000))
    assert watch(client, 1) == CHECK_STATUS.SERVING


def between_events(service: Service, action: Callable[[], object]) -> None:
    """Does something in the event loop's thread."""
    done: Future[object] = Future()

    def act() -> None:
        try:
            done.set_result(action())
        except Exception as error:
            done.set_exception(error)

    service.port._event_loop.call_soon(act)
    done.result(TIMEOUT_S)


def test_a_report_goes_on_after_a_connection_that_fails(service: Service) -> None:
    lost, client = raw(service), raw(service)
    for stream_id in (1, 3):
        lost.ask(stream_id, b"", WATCH_PATH)
        assert watch(lost, stream_id) == CHECK_STATUS.NOT_SERVING
    client.ask(1, b"", WATCH_PATH)
    assert watch(client, 1) == CHECK_STATUS.NOT_SERVING

    def lose_and_end() -> None:
        lost.sock.shutdown(socket.SHUT_RDWR)
        service.health.close()
        service.port._calls._watches.report()

    between_events(service, lose_and_end)
    client.next(frames.HEADERS, 1)
    assert client.status(1) == 0
    wait_until(lambda: len(service.port._connections) == 1)


def test_calls_expire_also_after_their_connection_has_failed(service: Service) -> None:
    lost, _ = running(service, 2)
    calls = service.port._calls

    def lose_and_expire() -> None:
        lost.sock.shutdown(socket.SHUT_RDWR)
        for caller in list(calls._inline_calls._callers):
            assert caller.inline_call is not None
            assert caller.inline_call.staged.job is not None
            caller.inline_call.staged.job.deadline = 0.0
        calls._on_tick()

    between_events(service, lose_and_expire)
    assert len(service.port._connections) == 0


def test_a_watch_ends_with_its_deadline_and_the_server_serves_some_only(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "_MAX_WATCHES", 1)
    client = raw(service)
    client.send(headers(WATCH_PATH, 1, [("grpc-timeout", "200m")]), data(prefixed(b""), 1, end=True))
    assert watch(client, 1) == CHECK_STATUS.NOT_SERVING
    client.ask(3, b"", WATCH_PATH)
    assert client.status(3) == RESOURCE_EXHAUSTED
    client.next(frames.HEADERS, 1)
    assert client.status(1) == DEADLINE_EXCEEDED
    client.ask(5, b"", WATCH_PATH)
    assert watch(client, 5) == CHECK_STATUS.NOT_SERVING


@pytest.mark.parametrize("said", [b"", data(prefixed(b""), 1)], ids=["nothing", "no end"])
def test_a_watch_whose_request_does_not_arrive_ends_with_its_deadline(service: Service, said: bytes) -> None:
    client = raw(service)
    client.send(headers(WATCH_PATH, 1, [("grpc-timeout", "200m")]), said)
    assert client.status(1) == DEADLINE_EXCEEDED


@pytest.mark.parametrize("message", [b"\xff", None], ids=["malformed", "none"])
def test_a_watch_without_a_good_request_is_refused(service: Service, message: bytes | None) -> None:
    client = raw(service)
    client.send(headers(WATCH_PATH, 1), data(b"" if message is None else prefixed(message), 1, end=True))
    assert client.status(1) == INVALID_ARGUMENT


def test_the_window_of_a_call_is_restored_also_for_padding(service: Service) -> None:
    client = raw(service)
    client.ask(1)
    client.answer(1)
    client.send(headers(PATH, 3))
    padded = struct.pack(">B", 255) + b"%b" + bytes(255)
    message = prefixed(REQUEST)
    for start in range(len(message)):  # in all, far more than the window
        part = padded.replace(b"%b", message[start : start + 1])
        client.send(frames.frame(frames.DATA, frames.PADDED, 3, part))
    client.send(data(b"", 3, end=True))
    check_sum(client.answer(3))


def test_a_watch_does_not_keep_a_connection_that_is_to_end(service: Service) -> None:
    client = raw(service)
    client.ask(1, b"", WATCH_PATH)
    assert watch(client, 1) == CHECK_STATUS.NOT_SERVING
    (connection,) = service.port._connections._all
    service.port._event_loop.call_soon(partial(service.port._connections.endings.announce, connection))
    client.next(frames.HEADERS, 1)
    assert client.status(1) == 0
    wait_until(lambda: len(service.port._connections) == 0)


def test_the_sdk_has_one_call_at_a_time(service: Service) -> None:
    service.worker.may_run.clear()
    client = raw(service)
    for stream_id in (1, 3):
        call = headers(PATH, stream_id, [("user-agent", "bngrad")])
        client.send(call, data(prefixed(REQUEST), stream_id, end=True))
        if stream_id == 1:
            wait_until(lambda: service.engine.admission.admitted == 1)
    assert client.code(frames.RST_STREAM, 3) == REFUSED
    service.worker.may_run.set()
    check_sum(client.answer(1))


def test_a_connection_for_whose_data_there_is_no_memory_is_read_later(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver, failed = MultiplexedConnection._deliver_data, threading.Event()

    def deliver_the_second_time(connection: MultiplexedConnection) -> None:
        if connection._receiving is not None and not failed.is_set():
            failed.set()
            raise MemoryError
        deliver(connection)

    client = raw(service)
    client.ask(1)
    client.answer(1)
    monkeypatch.setattr(MultiplexedConnection, "_deliver_data", deliver_the_second_time)
    message = prefixed(REQUEST)
    client.send(headers(PATH, 3), data(message[:100], 3))
    assert failed.wait(TIMEOUT_S)
    client.send(data(message[100:], 3, end=True))
    check_sum(client.answer(3))
