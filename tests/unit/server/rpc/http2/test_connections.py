"""The connections of the HTTP/2 port: many real sockets against one event loop."""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from unittest import mock

import pytest
from tests.raw_http2 import data, headers, prefixed
from tests.unit.server.rpc.http2.raw_client import Raw, check_sum, raw
from tests.unit.server.rpc.http2.service import (
    INVALID_ARGUMENT,
    PATH,
    REQUEST,
    RESOURCE_EXHAUSTED,
    TOO_MANY_FIELDS,
    Service,
    ask,
    ask_by_chunks,
    busy,
    check_answered,
    check_works,
    code_of,
    half_made,
    look_between_events,
    read_answer,
    receiving,
)
from tests.unit.server.workers.additions import TIMEOUT_S, inputs, request_of, wait_until

from bngrad_server.rpc.http2 import reading
from bngrad_server.rpc.http2.connection import Connection
from bngrad_server.rpc.http2.handlers import Http2Handler
from bngrad_server.rpc.http2.limits import futile_calls
from bngrad_server.rpc.http2.limits.penalties import Penalties
from bngrad_server.rpc.http2.limits.waste import Waste
from bngrad_server.rpc.servicer import SERVER_INFO_PATH
from bngrad_server.rpc_context import RpcContext
from bngrad_wire import http2
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.header_block import encode

REQUEST_HEADERS = [(":method", "POST"), (":scheme", "http"), (":path", PATH), ("content-type", "application/grpc")]
REQUEST_BLOCK = encode(REQUEST_HEADERS)
DELAY_S = 60.0
_THREAD_PREFIX = "http2-"
"""What the names of the port's threads begin with."""


def test_thousands_of_refused_calls_end_their_connection(service: Service) -> None:
    block = encode([*REQUEST_HEADERS, ("user-agent", "bngrad")])
    calls = [frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block) for stream in range(1, 20_001, 2)]
    sock, told = service.socket(), bytearray()

    def listen() -> None:
        with suppress(ConnectionError):
            while answer := sock.recv(2**16):
                told.extend(answer)

    with ThreadPoolExecutor(1) as thread, suppress(ConnectionError):
        thread.submit(listen)
        sock.sendall(frames.PREFACE + frames.settings({}) + b"".join(calls))
        sock.shutdown(socket.SHUT_WR)
    assert b"2000 frames within a second" in told
    check_works(service)


def test_a_client_that_reads_byte_by_byte_is_cut_off(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.engine.transfers, "_timeout_s", 1.0)
    client = service.connect()
    check_answered(ask(client))
    slow = client.io._sock
    (connection,) = service.port._connections._all
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # so the system's least
    slow.sendall(frames.frame(frames.PING, 0, 0, bytes(8)) * 1000)
    wait_until(lambda: not connection.is_watched)
    wait_until(lambda: slow.recv(1) == b"" or len(service.port._connections) == 0)
    check_works(service)


@pytest.mark.parametrize("has_long_calls", [True, False])
def test_connections_take_turns_after_large_calls_that_the_event_loop_computes(
    service: Service, has_long_calls: bool
) -> None:
    connections = service.port._connections
    connections.readers._has_long_calls = has_long_calls
    long_readers = service.port._event_loop._long_readers
    client = service.connect()
    check_answered(ask(client))
    (connection,) = connections._all
    assert connection.fd not in long_readers
    large = request_of(inputs(shape=(1, 100, 100, 3))).SerializeToString()
    assert read_answer(ask(client, large)).x_backprop.data
    wait_until(lambda: connection in connections.idle and (connection.fd in long_readers) == has_long_calls)
    check_answered(ask(client))
    wait_until(lambda: connection.fd not in long_readers)


def test_a_client_that_does_not_speak_http2_loses_only_its_own_connection(service: Service) -> None:
    other, sock = service.connect(), service.socket()
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    while sock.recv(2**16):
        pass
    check_answered(ask(other))


def connected(service: Service, count: int, *, over_tcp: bool = False) -> list[http2.ClientConnection]:
    connections = []
    for _ in range(count):
        connections.append(service.connect(over_tcp=over_tcp))
        check_answered(ask(connections[-1]))
    return connections


def usable(*connections: http2.ClientConnection) -> list[bool]:
    return [connection.usable for connection in connections]


def test_the_connection_that_was_idle_longest_makes_room(service: Service) -> None:
    service.port._connections._local.count = 3
    first, second, third = connected(service, 3)
    for connection in (second, third, first):
        check_answered(ask(connection))
    check_works(service)
    assert usable(first, second, third) == [True, False, True]
    assert service.engine.observer.metrics.status()["refused_connections"]["full"] == 1


def test_connections_over_tcp_take_no_places_of_local_ones(service: Service) -> None:
    service.port._connections._remote.count = 3
    local = connected(service, 3)
    remote = connected(service, 5, over_tcp=True)
    assert usable(*local, *remote) == [True] * 3 + [False] * 2 + [True] * 3


def test_half_made_messages_make_room_for_a_client_with_fewer_connections(service: Service) -> None:
    service.port._connections._remote.count = 4
    (idle,) = connected(service, 1, over_tcp=True)
    half_made(service, 3)
    wait_until(lambda: receiving(service) == 3)
    half_made(service, 3)
    wait_until(lambda: service.engine.observer.metrics.status()["refused_connections"]["full"] == 3)
    assert idle.usable
    (other,) = connected(service, 1, over_tcp=True)
    assert usable(idle, other) == [True] * 2
    wait_until(lambda: receiving(service) == 2)


def call_frame(stream_id: int, *, flags: int = frames.END_HEADERS | frames.END_STREAM) -> bytes:
    return frames.frame(frames.HEADERS, flags, stream_id, REQUEST_BLOCK)


RESETS = b"".join(
    call_frame(stream, flags=frames.END_HEADERS) + frames.rst_stream(stream, ErrorCode.CANCEL)
    for stream in range(101, 100_101, 2)
)

FLOODS = {
    "PING": frames.frame(frames.PING, 0, 0, bytes(8)) * 100_000,
    "WINDOW_UPDATE on a closed stream": frames.window_update(1, 1) * 100_000,
    "DATA on a closed stream": frames.frame(frames.DATA, 0, 1, b"x") * 100_000,
    "calls that are reset at once": RESETS,
    "a half-made header block": frames.frame(frames.HEADERS, 0, 3, b""),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_connections_that_only_cost_time_get_a_small_share_of_it(service: Service, flood: bytes) -> None:
    bad, good = connected(service, 20), service.connect()
    check_answered(ask(good))
    before = set(threading.enumerate())
    for each in bad:
        each.io._sock.setblocking(False)
    began = time.monotonic()
    while time.monotonic() < began + 2:
        for each in bad:
            with suppress(OSError):
                each.io._sock.send(flood[: 2**16])
        check_answered(ask(good))
    wasted_s = sum(connection.waste.total_s for connection in service.port._connections._all)
    assert wasted_s < 1.0
    # The worker, and whatever calls of the good one overlapped: its next call may come before a thread is idle again.
    assert len(set(threading.enumerate()) - before) < len(bad)


def test_a_paused_connection_is_served_again(service: Service) -> None:
    connection = service.connect()
    check_answered(ask(connection))
    connection.io.send([frames.frame(frames.PING, frames.ACK, 0, bytes(8)) * 1000])
    for _ in range(3):
        check_answered(ask(connection))


def test_what_remains_of_a_refused_upload_is_discarded_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.engine, "max_message_nbytes", 64 * 2**20)
    connection = service.connect()
    check_answered(ask(connection))
    for _ in range(3):
        began = time.monotonic()
        assert code_of(ask(connection, bytes(65 * 2**20))) == RESOURCE_EXHAUSTED
        assert time.monotonic() - began < 10
    check_answered(ask(connection))


def test_a_frame_must_become_whole(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_FRAME_TIMEOUT_S", 0.3)
    idle, bad = connected(service, 2)
    client, *_ = (connection.client for connection in service.port._connections._all)
    bad.io.send([frames.frame(frames.HEADERS, 0, 3, b"")])
    wait_until(lambda: not bad.usable)
    assert idle.usable
    assert service.engine.observer.metrics.status()["refused_connections"]["silent"] == 1
    wait_until(lambda: delays_next_connection(service, client))


def test_a_frame_that_begins_with_the_call_before_it_must_become_whole(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FRAME_TIMEOUT_S", 0.3)
    (client,) = connected(service, 1)
    block = encode([*REQUEST_HEADERS[:2], (":path", SERVER_INFO_PATH), *REQUEST_HEADERS[3:]])
    call = frames.frame(frames.HEADERS, frames.END_HEADERS, 3, block) + data(prefixed(b""), 3, end=True)
    client.io.send([call + call[:5]])
    wait_until(lambda: len(service.port._connections) == 0)
    assert service.engine.observer.metrics.status()["refused_connections"]["silent"] == 1


def test_no_frame_is_late_for_a_time_in_which_the_server_itself_was_stopped(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FRAME_TIMEOUT_S", 1.0)
    client = raw(service)
    client.ask(1)
    client.answer(1)
    call = headers(PATH, 3) + data(prefixed(REQUEST), 3, end=True)
    client.send(call[:5])
    wait_until(lambda: bool(service.port._connections.readers.amid_frame))
    resumed = threading.Event()
    service.port._event_loop.call_soon(partial(time.sleep, 1.5))
    service.port._event_loop.call_soon(resumed.set)
    assert resumed.wait(TIMEOUT_S)
    time.sleep(0.3)  # so that it has looked for late frames
    client.send(call[5:])
    check_sum(client.answer(3))


def delays_next_connection(service: Service, client: str) -> bool:
    """Whether breaches count that delay the next connections of a client, if there are more of them."""
    return service.port._strangers._penalties._scores.of(client) > 0


def test_draining_answers_running_calls_and_leaves_no_thread(service: Service) -> None:
    before = set(threading.enumerate())
    idle, *others = (service.connect() for _ in range(4))
    for connection in (idle, *others):
        check_answered(ask(connection))
    service.worker.may_run.clear()
    calls = [ask(connection) for connection in others]
    wait_until(lambda: service.engine.admission.admitted == 3)
    stopping = threading.Thread(target=service.port.stop, args=(10 * TIMEOUT_S,))
    stopping.start()
    wait_until(lambda: not idle.usable)
    assert stopping.is_alive()
    service.worker.may_run.set()
    check_answered(*calls)
    stopping.join(TIMEOUT_S)
    assert not stopping.is_alive()
    wait_until(lambda: set(threading.enumerate()) < before)
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith(_THREAD_PREFIX)])


def test_first_calls_that_came_before_the_stop_are_answered(service: Service) -> None:
    loop, may_go_on = service.port._event_loop, threading.Event()

    def hold() -> None:
        may_go_on.wait(TIMEOUT_S)

    loop.call_soon(hold)
    calls = [ask(service.connect()) for _ in range(3)]
    wait_until(lambda: len(loop._background) == 3)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(service.port.stop, TIMEOUT_S)
        wait_until(lambda: len(loop._background) + len(loop._ready) == 4)
        may_go_on.set()
        check_answered(*calls)
    assert service.port._connections.drained.is_set()


def test_calls_that_outlast_the_drain_timeout_are_cut_off(service: Service) -> None:
    running, waiting = busy(service, 1)
    service.port.stop(0.1)
    for call in (running, *waiting):
        with pytest.raises(http2.PeerGoneError):
            call.receive_message()
    assert not service.is_at_rest
    service.worker.may_run.set()
    wait_until(lambda: service.is_at_rest)


def check_waits_until_its_delay_is_over(
    service: Service, bad: http2.ClientConnection, good: http2.ClientConnection
) -> None:
    suspended = service.port._connections.readers.paused._suspended
    wait_until(lambda: len(suspended) == 1)
    delayed, computed = ask(bad), len(service.worker.batches)
    check_answered(ask(good))
    assert sum(service.worker.batches[computed:]) == 1
    suspended.update(dict.fromkeys(suspended, 0.0))
    check_answered(delayed)


@pytest.mark.parametrize(
    ("nbytes", "has_long_calls"), [(1000, True), (2**18, True), (2**18, False)], ids=["small", "long", "large"]
)
def test_a_client_of_many_malformed_messages_waits_and_others_do_not(
    service: Service, nbytes: int, has_long_calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.port._connections.readers._has_long_calls = has_long_calls
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: DELAY_S if self._scores.of(peer) > 4 else 0.0)
    bad, good = (
        http2.ClientConnection(service.socket(over_tcp=True, source=f"127.0.0.{number}"), "here") for number in (2, 3)
    )
    for _ in range(3):
        assert code_of(ask(bad, TOO_MANY_FIELDS[:nbytes])) == INVALID_ARGUMENT
    wait_until(lambda: delays_next_connection(service, "127.0.0.2"))
    assert not delays_next_connection(service, "127.0.0.3")
    check_waits_until_its_delay_is_over(service, bad, good)


def test_a_client_that_cancels_hundreds_of_calls_waits_and_others_do_not(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: DELAY_S if self._scores.of(peer) else 0.0)
    monkeypatch.setattr(futile_calls, "_MOST", 1.5)
    bad, good = (
        http2.ClientConnection(service.socket(over_tcp=True, source=f"127.0.0.{number}"), "here") for number in (2, 3)
    )
    running, _ = busy(service, 0)
    for _ in range(2):
        call = ask(bad)
        wait_until(lambda: service.waiting == 1)
        call.cancel()
        wait_until(lambda: service.waiting == 0)
    service.worker.may_run.set()
    check_answered(running)
    check_waits_until_its_delay_is_over(service, bad, good)


def test_the_memory_of_an_answer_that_its_client_does_not_take_is_free_in_time(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.engine.transfers, "_timeout_s", 1.0)
    client = service.connect()
    client.outbound.append(frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))
    ask(client)
    wait_until(lambda: service.worker.batches == [1])
    assert not service.is_at_rest
    wait_until(lambda: service.is_at_rest)


def test_connections_that_have_ended_leave_their_places(service: Service) -> None:
    service.port._connections._local.count = 2
    for _ in range(5):
        client = service.connect()
        check_answered(ask(client))
        client.close()
        wait_until(lambda: len(service.port._connections) == 0)
    assert not service.port._connections.idle


def test_a_connection_that_is_outdated_is_closed_after_its_call(service: Service) -> None:
    running, _ = busy(service, 0)
    (connection,) = service.port._connections._all
    connection.is_outdated = True
    renewed = threading.Event()

    def renew() -> None:
        service.port._connections.renew()
        renewed.set()

    service.port._event_loop.call_soon(renew)
    assert renewed.wait(TIMEOUT_S)
    service.worker.may_run.set()
    check_answered(running)
    wait_until(lambda: len(service.port._connections) == 0)


def test_a_call_that_came_with_the_reset_of_the_one_before_is_answered(service: Service) -> None:
    """The server has read it already, so its socket does not become readable again."""
    client = service.connect()
    check_answered(ask(client))  # so that the client has acknowledged the server's settings
    service.worker.batches.clear()
    running, _ = busy(service, 0)
    given_up = ask(client)
    wait_until(lambda: service.waiting == 1)
    client.outbound.append(frames.rst_stream(given_up.id, ErrorCode.CANCEL))
    client.close_stream(given_up)
    call = ask(client)
    service.worker.may_run.set()
    check_answered(running, call)


def test_good_calls_after_a_malformed_message_do_not_count_as_such(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores: list[float] = []
    monkeypatch.setattr(Penalties, "add", lambda self, peer, score: scores.append(score))
    client = service.connect()
    assert code_of(ask(client, TOO_MANY_FIELDS)) == INVALID_ARGUMENT
    check_works(service)
    counted = len(scores)
    check_answered(ask(client))
    check_works(service)
    assert len(scores) == counted > 0


def test_a_connection_waits_for_its_client_only_while_a_thread_has_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    handle = Http2Handler.handle

    def handle_and_tell(handler: Http2Handler, call: http2.ServerCall, rpc: RpcContext) -> None:
        seen.append(call._connection.blocking)
        handle(handler, call, rpc)

    monkeypatch.setattr(Http2Handler, "handle", handle_and_tell)
    client = service.connect()
    for _ in range(2):
        call = client.call("/grpc.health.v1.Health/Check")
        call.send_message(b"")  # not its end, so it needs a thread
        assert call.receive_message() is not None
        assert call.receive_message() is None
    (connection,) = service.port._connections._all
    wait_until(lambda: connection in service.port._connections.idle)
    assert seen == [True, True]
    assert not connection.http.blocking
    assert not service.port._connections.lent


def test_a_paused_connection_is_not_read_until_its_time_comes_also_amid_a_call(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = service.port._connections.readers.paused
    busy(service, 0)
    others = set(service.port._connections._all)
    call = ask(service.connect())
    wait_until(lambda: service.waiting == 1)
    (connection,) = service.port._connections._all - others
    with monkeypatch.context() as pausing:
        pausing.setattr(paused, "resume", lambda: ())
        pausing.setattr(Waste, "count", lambda waste, began, weight: True)
        call._connection.io.send([frames.frame(frames.PING, frames.ACK, 0, bytes(8))])
        wait_until(lambda: connection in paused)
        assert not connection.is_watched
        call.cancel()
    wait_until(lambda: service.waiting == 0)


@pytest.mark.parametrize("kind", ["SDK", "stock"])
@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_paused_connection_that_its_client_closes_is_closed_unread(
    service: Service, monkeypatch: pytest.MonkeyPatch, kind: str, is_suspended: bool
) -> None:
    connections = service.port._connections
    client: http2.ClientConnection | Raw
    if kind == "SDK":
        client = service.connect()
        check_answered(ask(client))
        sock = client.io._sock
    else:
        client = raw(service)
        client.ask(1)
        client.answer(1)
        sock = client.sock
    (connection,) = connections._all
    monkeypatch.setattr(connections.readers.paused, "resume", lambda: ())
    pause = partial(connections.readers.suspend, delay_s=DELAY_S) if is_suspended else connections.readers.pause
    service.port._event_loop.call_soon(partial(pause, connection))
    wait_until(lambda: connection in connections.readers.paused)
    received = connection.http.io.moved
    sock.sendall(frames.frame(frames.PING, 0, 0, bytes(8)) * 100)
    look_between_events(service)
    assert connection in connections._all
    sock.shutdown(socket.SHUT_WR)
    wait_until(lambda: len(connections) == 0)
    assert connection.http.io.moved == received
    assert connection not in connections.readers.paused
    assert connection.fd not in service.port._event_loop._readers


def test_a_connection_that_was_paused_is_read_again_whether_or_not_its_end_could_be_awaited(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    (client,), readers, loop = connected(service, 1), service.port._connections.readers, service.port._event_loop
    (connection,) = service.port._connections._all
    for await_end in (loop.await_end, no_watch):
        monkeypatch.setattr(loop, "await_end", await_end)
        loop.call_soon(partial(readers.pause, connection))
        check_answered(ask(client))
        wait_until(lambda: connection.is_watched)
        assert not connection.is_end_watched


def test_the_thread_that_has_a_paused_connection_sees_its_end(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    (client,), _ = half_made(service, 1)
    connections, loop = service.port._connections, service.port._event_loop
    wait_until(lambda: len(connections.lent) == 1)
    (connection,) = connections.lent
    assert isinstance(connection, Connection)
    ended: list[object] = []
    monkeypatch.setattr(connections.lent, "_on_return", note_before(ended, connections._after_thread))
    monkeypatch.setattr(connections, "_close", note_before(ended, connections._close))
    monkeypatch.setattr(connections.readers.paused, "resume", lambda: ())
    loop.call_soon(partial(connections.readers.pause, connection))
    wait_until(lambda: connection.is_end_watched)
    client.close()
    wait_until(lambda: len(connections) == 0)
    assert ended == ["_after_thread", connection, "_close", connection]


def test_the_time_for_a_frame_begins_with_its_first_byte_and_ends_with_its_last(service: Service) -> None:
    (client,) = connected(service, 1)
    (connection,) = service.port._connections._all
    amid_frame, io = service.port._connections.readers.amid_frame, connection.http.io
    ping = frames.frame(frames.PING, 0, 0, bytes(8))
    client.io._sock.sendall(ping[:3])
    wait_until(lambda: connection in amid_frame)
    began = amid_frame[connection]
    client.io._sock.sendall(ping[3:6])
    wait_until(lambda: io.high - io.low == 6)
    client.io._sock.sendall(ping[6:9])
    wait_until(lambda: io.high - io.low == 9)
    assert amid_frame[connection] == began
    client.io._sock.sendall(ping[9:])
    wait_until(lambda: connection not in amid_frame)
    check_answered(ask(client))


def test_frames_between_calls_are_answered_although_more_of_them_came_than_are_handled_at_a_time(
    service: Service,
) -> None:
    (client,) = connected(service, 1)
    client.io.send([frames.frame(frames.PING, 0, 0, bytes(8)) * 200])
    check_acknowledged(client, 200)


def test_frames_amid_a_call_are_answered_before_the_call_is(service: Service) -> None:
    busy(service, 0)
    client = service.connect()
    ask(client)
    wait_until(lambda: service.waiting == 1)
    client.io.send([frames.frame(frames.PING, 0, 0, bytes(8)) * 200])
    check_acknowledged(client, 200)
    assert service.waiting == 1


def check_acknowledged(client: http2.ClientConnection, count: int) -> None:
    """Checks that a number of PINGs is answered, beside which the server has nothing to say but its settings."""
    received, acknowledgement = bytearray(client.io.buffer[client.io.low : client.io.high]), bytes([0, 0, 8, 6, 1])
    while received.count(acknowledgement) < count:
        data = client.io._sock.recv(2**16)
        assert data
        received += data


def test_a_client_that_does_not_read_amid_a_call_gets_no_thread_and_its_answer_afterwards(service: Service) -> None:
    running, _ = busy(service, 0)
    others = set(service.port._connections._all)
    client = service.connect()
    call = ask(client)
    wait_until(lambda: service.waiting == 1)
    (connection,) = service.port._connections._all - others
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # so the system's least
    client.io.send([frames.frame(frames.PING, 0, 0, bytes(8)) * 700])
    wait_until(lambda: bool(connection.http.outbound) and connection.http.frame_budget < 1500)
    assert not service.port._connections.lent
    assert connection not in service.port._connections.readers.amid_frame
    service.worker.may_run.set()
    check_answered(running, call)


def test_nothing_is_kept_of_a_connection_that_ends_for_a_breach_and_has_cost_too_much(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = service.port._connections.readers.paused
    (bad,) = connected(service, 1)
    (connection,) = service.port._connections._all
    monkeypatch.setattr(paused, "resume", lambda: ())
    monkeypatch.setattr(Waste, "count", lambda waste, began: connection not in service.port._connections._all)
    bad.io.send([frames.frame(frames.GOAWAY, 0, 1, bytes(8))])
    wait_until(lambda: len(service.port._connections) == 0)
    look_between_events(service)
    assert connection not in paused


def test_what_a_thread_has_received_is_no_waste_of_the_event_loop(service: Service) -> None:
    client = service.connect()
    assert code_of(ask(client, bytes(2**20))) == INVALID_ARGUMENT
    call = ask_by_chunks(client, shape=(10, 50, 50, 3))
    while call.receive_message() is not None:
        pass
    (connection,) = service.port._connections._all
    wait_until(lambda: connection in service.port._connections.idle)
    waste = connection.waste
    assert (waste._moved, waste._frame_budget) == (connection.http.io.moved, connection.http.frame_budget)
    assert waste.total_s == 0.0


def test_a_connection_for_which_there_is_no_place_is_closed(service: Service) -> None:
    service.port._connections._local.count = 0
    with pytest.raises(http2.PeerGoneError):
        ask(service.connect()).receive_message()
    assert len(service.port._connections) == 0
    service.port._connections._local.count = 1
    check_works(service)


def test_a_lent_connection_that_makes_room_is_closed_once_its_thread_is_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = service.port._connections
    connections._remote.count = 2
    half_made(service, 2)
    wait_until(lambda: receiving(service) == 2 and len(connections.lent) == 2)
    lent = set(connections._all)
    ended: list[object] = []
    monkeypatch.setattr(connections.lent, "_on_return", note_before(ended, connections._after_thread))
    monkeypatch.setattr(connections, "_close", note_before(ended, connections._close))
    others = connected(service, 1, over_tcp=True)
    wait_until(lambda: len(connections) == 2)
    assert usable(*others) == [True]
    (closed,) = lent - connections._all
    assert ended == ["_after_thread", closed, "_close", closed]
    assert set(connections.lent) == lent - {closed}


def note_before(noted: list[object], method: Callable[..., None]) -> Callable[..., None]:
    def note_and_call(connection: Connection, *options: bool) -> None:
        noted.extend([method.__name__, connection])
        method(connection, *options)

    return note_and_call


def test_a_connection_is_not_closed_for_half_a_frame_while_a_thread_has_it(service: Service) -> None:
    (client,), rest = half_made(service, 1)
    connections = service.port._connections
    wait_until(lambda: len(connections.lent) == 1)
    (connection,) = connections.lent
    assert isinstance(connection, Connection)

    def tick() -> None:
        connections.readers.amid_frame[connection] = -math.inf
        connections.tick()

    service.port._event_loop.call_soon(tick)
    look_between_events(service)
    assert connection not in connections.readers.amid_frame
    client.sendall(rest)
    wait_until(lambda: service.worker.batches == [1])
    wait_until(lambda: connection in connections.idle)


def test_a_connection_whose_thread_failed_is_closed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Http2Handler, "handle", mock.Mock(side_effect=KeyError))
    call = service.connect().call(SERVER_INFO_PATH)
    call.send_message(b"")
    with pytest.raises(http2.PeerGoneError):
        call.receive_message()
    wait_until(lambda: len(service.port._connections) == 0)


def test_a_connection_that_the_system_does_not_watch_is_closed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user's descriptors are watched more often than the system allows."""
    loop, (client,) = service.port._event_loop, connected(service, 1)
    call = client.call(SERVER_INFO_PATH)
    call.send_message(b"", more=True)
    with monkeypatch.context() as failing:
        failing.setattr(loop, "add_reader", no_watch)
        client.flush()
        wait_until(lambda: len(service.port._connections) == 0)
        assert not client.usable
        with pytest.raises(http2.PeerGoneError):
            ask(service.connect()).receive_message()
    check_works(service)


def no_watch(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_late", [False, True])
def test_a_cancelled_call_counts_until_one_is_answered_and_one_whose_deadline_passes_does_not(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    cancelled = service.port._calls._futile._cancelled
    if is_late:
        monkeypatch.setattr(futile_calls, "_LATENCY_S", 2 * TIMEOUT_S)  # the deadline counts as past all along
    running, _ = busy(service, 0)
    call = ask(service.connect(), timeout_s=TIMEOUT_S)
    wait_until(lambda: service.waiting == 1)
    call.cancel()
    wait_until(lambda: service.waiting == 0)
    look_between_events(service)
    assert len(cancelled) == (0 if is_late else 1)
    service.worker.may_run.set()
    check_answered(running)
    wait_until(lambda: len(cancelled) == 0)


def test_calls_whose_message_is_here_make_no_room_for_others(service: Service) -> None:
    connections = service.port._connections
    connections._remote.count = 2
    running, _ = busy(service, 0)
    clients, rest = half_made(service, 2)
    wait_until(lambda: len(connections.lent) == 2)
    lent = set(connections.lent)
    for each in clients:
        each.sendall(rest)
    wait_until(lambda: service.waiting == 2)
    with pytest.raises(http2.PeerGoneError):
        ask(service.connect(over_tcp=True)).receive_message()
    service.worker.may_run.set()
    check_answered(running)
    wait_until(lambda: lent <= set(connections.idle))


def test_the_event_loop_does_not_read_what_a_thread_has_although_it_was_to_do_so_soon(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, handle = threading.Event(), Http2Handler.handle

    def handle_later(handler: Http2Handler, call: http2.ServerCall, rpc: RpcContext) -> None:
        assert may_go_on.wait(TIMEOUT_S)
        handle(handler, call, rpc)

    monkeypatch.setattr(Http2Handler, "handle", handle_later)
    (client,), rest = half_made(service, 1)
    wait_until(lambda: len(service.port._connections.lent) == 1)
    (connection,) = service.port._connections.lent
    assert isinstance(connection, Connection)
    received = connection.http.io.moved
    client.sendall(rest)
    service.port._event_loop.call_soon(lambda: service.port._calls._on_readable(connection))
    look_between_events(service)
    assert connection.http.io.moved == received
    may_go_on.set()
    wait_until(lambda: service.worker.batches == [1])
