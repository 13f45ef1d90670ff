"""The connections of the HTTP/2 port: many real sockets against one event loop."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from tests.unit.server.workers.additions import NBYTES, TIMEOUT_S, Adder, check_answer, inputs, request_of, wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.config import ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.rpc import http2_connections
from bngrad_server.rpc.http2_port import Http2Port
from bngrad_server.rpc.servicer import Servicer
from bngrad_wire import http2
from bngrad_wire.http2 import frames
from bngrad_wire.http2.header_block import encode
from bngrad_wire.limits import MAX_PROTOBUF_NBYTES, REGION_NBYTES

PATH = "/bngrad.v1.BatchNormGradService/FusedBatchNormGradV3"
REQUEST = request_of(inputs()).SerializeToString()
_THREAD_PREFIX = "http2-"
"""What the names of the port's threads begin with."""


class Service:
    """An HTTP/2 port, and its clients, which are plain sockets."""

    def __init__(self, directory: Path) -> None:
        config = ServerConfig(arena_bytes=2**20, shared_bytes=REGION_NBYTES, max_requests=64)
        self.engine = Engine(config, lambda: None)
        self.port = Http2Port(Servicer(self.engine, MAX_PROTOBUF_NBYTES))
        self.worker = Adder(self.engine)
        self._path = str(directory / "calls")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._path)
        listener.listen(1024)
        self.port.listen_on_socket(listener)
        self.port.start()
        self._opened: list[socket.socket | http2.ClientConnection] = []
        self.engine.batcher.offer(self.worker)

    def socket(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self._path)
        sock.settimeout(TIMEOUT_S)
        self._opened.append(sock)
        return sock

    def connect(self) -> http2.ClientConnection:
        connection = http2.ClientConnection(self.socket(), "here")
        self._opened.append(connection)
        return connection

    @property
    def waiting(self) -> int:
        return len(self.engine.batcher._queue)

    @property
    def is_at_rest(self) -> bool:
        return self.engine.arena.free_bytes == self.engine.arena.nbytes and self.engine.admission.requests == 0

    def close(self) -> None:
        self.worker.may_run.set()
        for each in self._opened:
            each.close()
        self.port.stop(0)
        wait_until(lambda: self.is_at_rest)
        self.engine.close()
        self.worker.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.close()


def ask(
    connection: http2.ClientConnection, request: bytes = REQUEST, timeout_s: float | None = None
) -> http2.ClientCall:
    call = connection.call(PATH, timeout_s=timeout_s)
    call.send_message(request, end=True)
    return call


def read_answer(call: http2.ClientCall) -> pb.FusedBatchNormGradV3Response:
    nbytes = call.receive_message()
    assert nbytes is not None
    answer = pb.FusedBatchNormGradV3Response.FromString(call.read(nbytes))
    assert call.receive_message() is None
    return answer


def check_answered(*calls: http2.ClientCall) -> None:
    for call in calls:
        answer = read_answer(call)
        check_answer(answer, answer.x_backprop.data, inputs())


def check_works(service: Service) -> None:
    check_answered(ask(service.connect()))


def code_of(call: http2.ClientCall) -> int:
    with pytest.raises(http2.RpcError) as caught:
        call.receive_message()
    return caught.value.code


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
    assert service.engine.arena.free_bytes < service.engine.arena.nbytes
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
    block = arena.allocate(arena.nbytes)
    call = ask(service.connect())
    wait_until(lambda: len(arena._waiting) == 1)
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
    while service.engine.admission.entered == n_calls:  # until the answers have filled the socket
        slow.close_stream(ask(slow))
        n_calls += 1
        give_up = time.monotonic() + 0.5
        while service.engine.admission.entered < n_calls and time.monotonic() < give_up:
            time.sleep(0.001)
        wait_until(lambda: service.is_at_rest)  # or the next call would be refused
    check_works(service)
    received = slow.io.high - slow.io.low  # it has read once, for the server's window
    while received < n_calls * NBYTES:
        received += len(slow.io._sock.recv(2**16))
    check_works(service)


def test_thousands_of_refused_calls_end_their_connection(service: Service) -> None:
    block = encode([(":method", "POST"), (":path", PATH), ("content-type", "application/grpc")])
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
    assert b"2000 idle frames within a second" in told
    check_works(service)


def test_a_client_that_reads_byte_by_byte_is_cut_off(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.engine.transfers, "_timeout_s", 1.0)
    slow = service.socket()
    slow.sendall(frames.PREFACE + frames.settings({}))
    wait_until(lambda: len(service.port._connections) == 1)
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


def test_the_connection_that_was_idle_longest_makes_room(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connections, "_MAX_CONNECTIONS", 3)
    first, second, third = (service.connect() for _ in range(3))
    for connection in (second, third, first):
        check_answered(ask(connection))
    check_works(service)
    assert [connection.usable for connection in (first, second, third)] == [True, False, True]
    assert service.engine.observer.metrics.status()["refused_connections"]["full"] == 1


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


def test_calls_that_outlast_the_drain_timeout_are_cut_off(service: Service) -> None:
    running, waiting = busy(service, 1)
    service.port.stop(0.1)
    for call in (running, *waiting):
        with pytest.raises(http2.PeerGoneError):
            call.receive_message()
    assert not service.is_at_rest
    service.worker.may_run.set()
    wait_until(lambda: service.is_at_rest)
