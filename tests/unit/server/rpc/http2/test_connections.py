"""The connections of the HTTP/2 port: many real sockets against one event loop."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import pytest
from tests.unit.server.rpc.http2.service import (
    PATH,
    REQUEST,
    Service,
    ask,
    check_answered,
    check_works,
    code_of,
    read_answer,
)
from tests.unit.server.workers.additions import NBYTES, TIMEOUT_S, Adder, inputs, request_of, wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS
from bngrad_server.rpc import futile_calls
from bngrad_server.rpc.http2 import connections
from bngrad_server.rpc.http2.limits.penalties import Penalties
from bngrad_server.rpc.http2.receiving import ReceivingCalls
from bngrad_server.rpc.servicer import EXCHANGE_PATH
from bngrad_wire import http2, messages
from bngrad_wire.http2 import frames
from bngrad_wire.http2.call import PREFIX
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.header_block import encode

INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 3, 4, 8
DELAY_S = 60.0
_THREAD_PREFIX = "http2-"
"""What the names of the port's threads begin with."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.close()


def busy(service: Service, n_waiting: int) -> tuple[http2.ClientCall, list[http2.ClientCall]]:
    """A call that is computed until the worker may run, and calls that wait for it."""
    service.worker.may_run.clear()
    running = ask(service.connect())
    wait_until(lambda: service.worker.batches == [1])
    waiting = [ask(service.connect()) for _ in range(n_waiting)]
    wait_until(lambda: service.waiting == n_waiting)
    return running, waiting


def test_calls_that_wait_take_no_threads_and_are_one_batch(service: Service) -> None:
    check_works(service)
    service.worker.batches.clear()
    before = set(threading.enumerate())
    running, waiting = busy(service, 40)
    assert len(set(threading.enumerate()) - before) == 1  # the worker
    service.worker.may_run.set()
    check_answered(running, *waiting)
    assert service.worker.batches == [1, 40]


def test_a_connection_serves_call_after_call(service: Service) -> None:
    connection = service.connect()
    for _ in range(50):
        check_answered(ask(connection))


@pytest.mark.parametrize("sent", [0, 5, 24, 30, 33, 60, 200, 1000, -1])
def test_a_client_that_pauses_amid_a_call_does_not_delay_others(service: Service, sent: int) -> None:
    near, far = socket.socketpair()
    with near, far:
        connection = http2.ClientConnection(near, "here")
        call = ask(connection)
        data = far.recv(2**20)
        sock = service.socket()
        sock.sendall(data[:sent])
        for _ in range(3):
            check_works(service)
        sock.sendall(data[sent:])
        near.settimeout(TIMEOUT_S)
        answered = threading.Thread(target=relay, args=(sock, far))
        answered.start()
        check_answered(call)
        sock.shutdown(socket.SHUT_RDWR)
        answered.join(TIMEOUT_S)
        connection.close()


def relay(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(2**16):
        target.sendall(data)


@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_client_that_disconnects_or_resets_leaves_no_memory_or_request_behind(service: Service, how: str) -> None:
    running, (waiting, other) = busy(service, 2)
    for call in (waiting, running):
        if how == "closes":
            call._connection.close()
        else:
            call.cancel()
    wait_until(lambda: service.engine.admission.requests == 1)
    assert service.waiting == 1
    assert service.engine.arena.used_bytes
    service.worker.may_run.set()
    check_answered(other)
    wait_until(lambda: service.is_at_rest)
    if how == "resets":
        assert isinstance(waiting._connection, http2.ClientConnection)
        check_answered(ask(waiting._connection))


@pytest.mark.slow
def test_a_deadline_ends_calls_that_wait_or_run(service: Service) -> None:
    service.worker.may_run.clear()
    calls = [ask(service.connect(), timeout_s=5.0)]
    wait_until(lambda: service.worker.batches == [1])
    calls.append(ask(service.connect(), timeout_s=5.0))
    assert [code_of(call) for call in calls] == [4, 4]
    assert not service.is_at_rest  # the worker has not ended yet
    service.worker.may_run.set()
    wait_until(lambda: service.is_at_rest)
    check_works(service)


def test_jobs_of_a_worker_that_died_are_computed_by_the_next(service: Service) -> None:
    running, waiting = busy(service, 2)
    dead, service.worker = service.worker, Adder(service.engine)
    dead.die()
    service.engine.batcher.withdraw(dead)
    wait_until(lambda: service.waiting == 3)
    service.engine.batcher.offer(service.worker)
    check_answered(running, *waiting)
    assert service.worker.batches == [1, 2]  # what a worker may have died of comes first, and alone
    dead.may_run.set()
    dead.close()


def test_a_call_for_which_no_memory_is_free_waits_for_it(service: Service) -> None:
    arena = service.engine.arena
    blocks = [arena.allocate(arena.nbytes, "other")]
    for nbytes in (arena.reserve_nbytes >> exponent for exponent in range(2, 16)):
        while (block := arena.allocate_at_once(nbytes, "other")) is not None:
            blocks.append(block)
    call = ask(service.connect())
    wait_until(lambda: arena.is_waited_for)
    for block in blocks:
        arena.free(block)
    check_answered(call)


def test_a_large_answer_to_a_small_call_comes_whole(service: Service) -> None:
    """Its inputs are shared, and its output is not."""
    region = service.engine.regions.lease(2**20)
    request = request_of(inputs())
    for name, offset in (("x", 0), ("y_backprop", 2**18)):
        tensor = getattr(request, name)
        tensor.ClearField("data")
        tensor.shape[:] = (1, 100, 200, 3)
        tensor.location.CopyFrom(pb.Location(region_key=region.key, offset=offset))
    connection = service.connect()
    for _ in range(3):
        answer = read_answer(ask(connection, request.SerializeToString()))
        assert answer.x_backprop.data == bytes(240_000)
    wait_until(lambda: service.is_at_rest)
    service.engine.regions.end(region)


def test_a_client_that_does_not_read_delays_no_other_and_gets_its_answers(service: Service) -> None:
    slow, n_calls = service.connect(), 0
    while len(service.worker.batches) == n_calls:  # until the answers have filled the socket
        slow.close_stream(ask(slow))
        n_calls += 1
        give_up = time.monotonic() + 0.5
        while len(service.worker.batches) < n_calls and time.monotonic() < give_up:
            time.sleep(0.001)
        wait_until(lambda: service.is_at_rest)  # or the next call would be refused
    check_works(service)
    received = slow.io.high - slow.io.low  # it has read once, for the server's window
    while received < n_calls * NBYTES:
        received += len(slow.io._sock.recv(2**16))
    check_works(service)


def test_a_call_that_stops_amid_its_message_is_begun_all_the_same(service: Service) -> None:
    request = request_of(inputs())
    for tensor in (request.x, request.y_backprop):
        tensor.shape[:], tensor.data = (1, 100, 60, 3), bytes(72_000)
    message, client = request.SerializeToString(), service.connect()
    assert read_answer(ask(client, message)).x_backprop.data == bytes(72_000)
    call = client.call(PATH)
    call.send_message(message, end=True, more=True)
    sent = b"".join(client.outbound)
    client.outbound = [sent[:70_000]]
    client.flush()
    (connection,) = service.port._connections._all
    wait_until(lambda: connection.http.awaits_rest)
    check_works(service)
    wait_until(lambda: connection.http.stream is not None)  # a thread waits for the rest
    client.outbound = [sent[70_000:]]
    client.flush()
    assert read_answer(call).x_backprop.data == bytes(72_000)
    assert read_answer(ask(client, message)).x_backprop.data == bytes(72_000)


def test_thousands_of_refused_calls_end_their_connection(service: Service) -> None:
    request = [(":method", "POST"), (":scheme", "http"), (":path", PATH), ("content-type", "application/grpc")]
    block = encode(request)
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


def test_a_client_that_does_not_speak_http2_loses_only_its_own_connection(service: Service) -> None:
    other, sock = service.connect(), service.socket()
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    while sock.recv(2**16):
        pass
    check_answered(ask(other))


def test_refusals_take_no_threads(service: Service) -> None:
    check_works(service)
    service.worker.batches.clear()
    _, _ = busy(service, 63)
    before = set(threading.enumerate())
    connection = service.connect()
    for _ in range(20):
        assert code_of(ask(connection)) == 8  # the server is full
        assert code_of(ask(connection, b"")) == 8  # which is found out first
    assert set(threading.enumerate()) <= before


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


def half_made(service: Service, count: int, source: str = "127.0.0.2") -> tuple[list[socket.socket], bytes]:
    """Connections over TCP that lack the returned end of a message; those of a source are one client's."""
    near, far = socket.socketpair()
    with near, far:
        ask(http2.ClientConnection(near, "here"))
        data = far.recv(2**20)
    bad = [service.socket(over_tcp=True, source=source) for _ in range(count)]
    for each in bad:
        each.sendall(data[:-20])
    return bad, data[-20:]


def receiving(service: Service) -> int:
    """How many connections have a thread or wait for one, to receive a message."""
    return len(service.port._connections._receiving)


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


def test_half_made_messages_take_a_share_of_threads_and_are_answered_once_whole(service: Service) -> None:
    service.port._connections._receiving = ReceivingCalls(6)
    bad, rest = half_made(service, 10)
    wait_until(lambda: receiving(service) == 10)
    assert len(service.port._connections._lent) == 4
    (good,), _ = half_made(service, 1, "127.0.0.1")
    wait_until(lambda: receiving(service) == 11)
    good.sendall(rest)
    wait_until(lambda: service.worker.batches == [1])
    for each in reversed(bad):
        each.sendall(rest)
    wait_until(lambda: sum(service.worker.batches) == 11)
    wait_until(lambda: receiving(service) == 0)


def test_a_call_does_not_wait_for_a_thread_for_ever(service: Service) -> None:
    service.port._connections._receiving = ReceivingCalls(1, timeout_s=1.0)
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
    service.port._connections._receiving = ReceivingCalls(is_worthwhile=lambda client: not full)
    before = set(threading.enumerate())
    (waiting,), rest = half_made(service, 1)
    wait_until(lambda: receiving(service) == 1)
    waiting.sendall(rest)
    time.sleep(0.3)
    assert set(threading.enumerate()) == before
    full.clear()
    wait_until(lambda: service.worker.batches == [1])


def test_a_call_of_a_client_at_its_limits_is_refused_in_time(service: Service) -> None:
    service.port._connections._receiving = ReceivingCalls(is_worthwhile=lambda client: False, max_wait_s=0.3)
    call = service.connect(over_tcp=True).call(PATH)
    call.send_message(REQUEST, more=True)
    assert code_of(call) == RESOURCE_EXHAUSTED
    assert receiving(service) == 0


def test_a_call_that_waits_for_a_thread_does_not_delay_the_stop(service: Service) -> None:
    service.port._connections._receiving = ReceivingCalls(1)
    half_made(service, 3)
    wait_until(lambda: receiving(service) == 3)
    service.port.stop(0.1)
    assert service.port._connections.drained.is_set()


def call_frame(stream_id: int, *, flags: int = frames.END_HEADERS | frames.END_STREAM) -> bytes:
    request = [(":method", "POST"), (":scheme", "http"), (":path", PATH), ("content-type", "application/grpc")]
    block = encode(request)
    return frames.frame(frames.HEADERS, flags, stream_id, block)


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


def test_what_remains_of_a_refused_upload_is_discarded_at_once(service: Service) -> None:
    connection = service.connect()
    check_answered(ask(connection))
    for _ in range(3):
        began = time.monotonic()
        assert code_of(ask(connection, bytes(65 * 2**20))) == RESOURCE_EXHAUSTED
        assert time.monotonic() - began < 10
    check_answered(ask(connection))


def test_a_frame_must_become_whole(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_FRAME_TIMEOUT_S", 0.3)
    idle, bad = connected(service, 2)
    bad.io.send([frames.frame(frames.HEADERS, 0, 3, b"")])
    wait_until(lambda: not bad.usable)
    assert idle.usable


def test_draining_answers_running_calls_and_leaves_no_thread(service: Service) -> None:
    before = set(threading.enumerate())
    idle, *others = (service.connect() for _ in range(4))
    for connection in (idle, *others):
        check_answered(ask(connection))
    service.worker.may_run.clear()
    calls = [ask(connection) for connection in others]
    wait_until(lambda: service.engine.admission.requests == 3)
    stopping = threading.Thread(target=service.port.stop, args=(TIMEOUT_S,))
    stopping.start()
    wait_until(lambda: not idle.usable)
    assert stopping.is_alive()
    service.worker.may_run.set()
    check_answered(*calls)
    stopping.join(TIMEOUT_S)
    wait_until(lambda: set(threading.enumerate()) < before)
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith(_THREAD_PREFIX)])


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
        connection.io.send([frames.frame(frames.PING, 0, 0, bytes(8))])  # a closed socket would answer with a reset
        assert len(read_answer(call).x_backprop.data) == 2**18
        stopped.result(TIMEOUT_S)
    assert service.port._connections.drained.is_set()


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_client_that_does_not_receive_its_last_answer_does_not_keep_the_server(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.setattr(connections, "_DELIVERY_TIMEOUT_S", DELAY_S if is_gone else 0.5)
    connection, _ = answered_but_undelivered(service)
    if is_gone:
        connection.close()
    service.port.stop(TIMEOUT_S)
    assert service.port._connections.drained.is_set()


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


TOO_MANY_FIELDS = b"\x78\0" * 2**17
"""More fields than a message may have."""


def sent_in_part(connection: http2.ClientConnection, path: str, message: bytes) -> http2.ClientCall:
    """Begins a call, and sends the first 32 KiB of its message."""
    call = connection.call(path)
    begun = PREFIX.pack(0, len(message)) + message[: 2**15]
    pieces = [begun[start : start + 2**14] for start in range(0, len(begun), 2**14)]
    connection.io.send([*connection.outbound, *(frames.frame(frames.DATA, 0, call.id, piece) for piece in pieces)])
    connection.outbound.clear()
    return call


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_message_that_begins_badly_is_refused_before_it_has_arrived(service: Service, is_nested: bool) -> None:
    connection = service.connect()
    message = messages.field_prefix(1, len(TOO_MANY_FIELDS)) * is_nested + TOO_MANY_FIELDS
    call = sent_in_part(connection, PATH, message)
    assert code_of(call) == INVALID_ARGUMENT
    check_answered(ask(connection))
    wait_until(lambda: service.is_at_rest)


def test_a_request_of_an_exchange_that_begins_badly_is_refused_before_it_has_arrived(service: Service) -> None:
    message = messages.field_prefix(OPS[0].exchange_number, len(TOO_MANY_FIELDS)) + TOO_MANY_FIELDS
    assert code_of(sent_in_part(service.connect(), EXCHANGE_PATH, message)) == INVALID_ARGUMENT


def test_a_large_message_that_begins_well_is_waited_for(service: Service) -> None:
    message = messages.field_prefix(1, 2**18) + messages.field_prefix(3, 2**18 - 4) + bytes(2**18)
    call = sent_in_part(service.connect(), PATH, message)
    call._connection.io.set_timeout(0.5)
    with pytest.raises(TimeoutError):
        call.receive_message()


def check_waits_until_its_delay_is_over(
    service: Service, bad: http2.ClientConnection, good: http2.ClientConnection
) -> None:
    suspended = service.port._connections._paused._suspended
    wait_until(lambda: len(suspended) == 1)
    delayed, computed = ask(bad), len(service.worker.batches)
    check_answered(ask(good))
    assert sum(service.worker.batches[computed:]) == 1
    suspended.update(dict.fromkeys(suspended, 0.0))
    check_answered(delayed)


@pytest.mark.parametrize("nbytes", [1000, 2**18], ids=["small", "large"])
def test_a_client_of_many_malformed_messages_waits_and_others_do_not(
    service: Service, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: DELAY_S if self._score(peer) > 5 else 0.0)
    bad, good = (
        http2.ClientConnection(service.socket(over_tcp=True, source=f"127.0.0.{number}"), "here") for number in (2, 3)
    )
    for _ in range(3):
        assert code_of(ask(bad, TOO_MANY_FIELDS[:nbytes])) == INVALID_ARGUMENT
    check_waits_until_its_delay_is_over(service, bad, good)


def test_a_client_that_cancels_hundreds_of_calls_waits_and_others_do_not(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Penalties, "delay_s", lambda self, peer: DELAY_S if self._score(peer) else 0.0)
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
