"""The calls of the HTTP/2 port: many real sockets against one event loop."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest
from tests.unit.server.rpc.http2.service import (
    INVALID_ARGUMENT,
    PATH,
    TOO_MANY_FIELDS,
    Service,
    all_memory,
    ask,
    ask_by_chunks,
    busy,
    check_answered,
    check_answered_by_chunks,
    check_works,
    code_of,
    read_answer,
    ticket_of_x,
)
from tests.unit.server.workers.additions import NBYTES, TIMEOUT_S, Adder, inputs, request_of, wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS
from bngrad_server.rpc.http2 import handlers
from bngrad_server.rpc.servicer import EXCHANGE_PATH, SEND_AHEAD_PATH
from bngrad_server.rpc_context import RpcContext
from bngrad_server.staged_request import StagedRequest
from bngrad_wire import http2, messages
from bngrad_wire.http2 import frames
from bngrad_wire.http2.errors import ErrorCode
from bngrad_wire.http2.sending import PREFIX
from bngrad_wire.http2.server import connection as server_connection
from bngrad_wire.http2.sockets.receive_buffer import LARGE_BUFFER_NBYTES


def test_calls_that_wait_take_no_threads_and_are_one_batch(service: Service) -> None:
    check_works(service)
    service.worker.batches.clear()
    before = set(threading.enumerate())
    running, waiting = busy(service, 40)
    assert len(set(threading.enumerate()) - before) == 1  # the worker
    service.worker.may_run.set()
    check_answered(running, *waiting)
    assert service.worker.batches == [1, 40]


def test_small_exchanges_that_wait_take_no_threads_and_are_one_batch(service: Service) -> None:
    check_answered_by_chunks(ask_by_chunks(service.connect()))  # the first of its kind has a thread
    service.worker.batches.clear()
    before = set(threading.enumerate())
    service.worker.may_run.clear()
    running = ask_by_chunks(service.connect())
    wait_until(lambda: service.worker.batches == [1])
    waiting = [ask_by_chunks(service.connect()) for _ in range(40)]
    wait_until(lambda: service.waiting == 40)
    assert len(set(threading.enumerate()) - before) == 1  # the worker
    service.worker.may_run.set()
    check_answered_by_chunks(running, *waiting)
    assert service.worker.batches == [1, 40]
    wait_until(lambda: service.is_at_rest)


@pytest.mark.parametrize("by_chunks", [False, True])
def test_a_long_response_of_a_call_without_a_thread_is_sent_by_one(
    service: Service, monkeypatch: pytest.MonkeyPatch, by_chunks: bool
) -> None:
    send, check = (ask_by_chunks, check_answered_by_chunks) if by_chunks else (ask, check_answered)
    check(send(service.connect()))
    sent: list[object] = []
    send_response = handlers.Http2Handler.send_response

    def send_and_tell(handler: handlers.Http2Handler, call: http2.ServerCall, staged: StagedRequest) -> None:
        sent.append(threading.current_thread())
        send_response(handler, call, staged)

    monkeypatch.setattr(handlers, "_AT_ONCE_NBYTES", 100)
    monkeypatch.setattr(handlers.Http2Handler, "send_response", send_and_tell)
    check(*[send(service.connect()) for _ in range(3)])
    assert len(sent) == 3
    assert service.port._event_loop._thread not in sent
    wait_until(lambda: service.is_at_rest)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_exchange_with_a_chunk_too_many_is_refused_also_where_its_like_is_known(
    service: Service, is_ahead: bool
) -> None:
    connection, ahead = service.connect(), service.connect()
    ticket = ticket_of_x(ahead) if is_ahead else b""
    for _ in range(2):
        check_answered_by_chunks(ask_by_chunks(connection, ticket=ticket))
        call = ask_by_chunks(connection, ticket=ticket, more=bytes(NBYTES))
        with pytest.raises(http2.RpcError, match="a request must come first, not chunk"):
            check_answered_by_chunks(call)
    ahead.close()
    wait_until(lambda: service.is_at_rest)


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
    wait_until(lambda: service.engine.admission.admitted == 1)
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
    for call in calls:
        assert isinstance(call._connection, http2.ClientConnection)
        check_answered(ask(call._connection))


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
    arena, blocks = service.engine.arena, all_memory(service)
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


def test_a_call_that_stops_amid_its_message_is_begun_all_the_same(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_connection, "_REST_TIMEOUT_S", TIMEOUT_S)
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
    connection.http._rest_until = time.monotonic()
    wait_until(lambda: connection.http.stream is not None)  # a thread waits for the rest
    client.outbound = [sent[70_000:]]
    client.flush()
    assert read_answer(call).x_backprop.data == bytes(72_000)
    assert read_answer(ask(client, message)).x_backprop.data == bytes(72_000)


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


def test_a_long_first_message_of_a_tensor_sent_ahead_is_refused_unread(service: Service) -> None:
    call = service.connect().call(SEND_AHEAD_PATH)
    call.send_message(bytes(64 * 1024 + 1))
    with pytest.raises(http2.RpcError, match="the first message must have at most 65536 bytes, not 65537"):
        call.receive_message()


@pytest.mark.parametrize(("shape", "is_whole"), [((1, 140, 140, 3), True), ((1, 160, 160, 3), False)])
def test_the_next_call_is_expected_whole_only_up_to_a_size(
    service: Service, shape: tuple[int, ...], is_whole: bool
) -> None:
    """Where a worker computes it; its two tensors have 459 KiB or 600 KiB."""
    client = service.connect()
    assert read_answer(ask(client, request_of(inputs(shape=shape)).SerializeToString())).x_backprop.data
    (connection,) = service.port._connections._all
    wait_until(lambda: connection in service.port._connections.idle)
    assert connection.http.expects_large_call == is_whole


def test_no_call_is_expected_whole_that_the_buffer_cannot_hold(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the calls are that the event loop computes."""
    monkeypatch.setattr(service.port._calls, "_max_whole_nbytes", 2**40)
    check_answered(ask(service.connect()))
    (connection,) = service.port._connections._all
    assert connection.http.max_whole_nbytes < LARGE_BUFFER_NBYTES


def test_a_thread_that_waits_for_a_client_looks_twice_a_second_and_for_a_minute(service: Service) -> None:
    check_answered(ask(service.connect()))
    (connection,) = service.port._connections._all
    timeout = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.calcsize("@ll"))
    assert struct.unpack("@ll", timeout) == (0, 500_000)
    assert connection.http.io.waits == 120


def test_a_call_that_its_client_resets_at_once_is_not_begun(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    client = service.connect()
    check_answered(ask(client))
    begun: list[int] = []
    checked_context = handlers.Http2Handler.checked_context

    def check_and_note(handler: handlers.Http2Handler, call: http2.ServerCall) -> RpcContext:
        begun.append(call.id)
        return checked_context(handler, call)

    monkeypatch.setattr(handlers.Http2Handler, "checked_context", check_and_note)
    reset = client.call(SEND_AHEAD_PATH)  # another path than before, so that it is not taken whole
    client.outbound.append(frames.rst_stream(reset.id, ErrorCode.CANCEL))
    client.close_stream(reset)
    client.flush()
    call = ask(client)
    check_answered(call)
    assert begun == [call.id]
