"""An HTTP/2 port with a worker that is a thread, and its clients, which are plain sockets."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Protocol

import pytest
from tests.unit.server.workers.additions import SHAPE, TIMEOUT_S, Adder, check_answer, inputs, request_of, wait_until

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS
from bngrad_server.config import ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.memory.allocator import Block
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.http2.port import Http2Port
from bngrad_server.rpc.other_calls import other_calls
from bngrad_server.rpc.servicer import EXCHANGE_PATH, SEND_AHEAD_PATH, Servicer
from bngrad_server.security.auth import ALLOW_ALL, Authenticator
from bngrad_server.security.certificates import Certificates
from bngrad_wire import http2, messages
from bngrad_wire.chunks import AHEAD_CHUNK, REQUEST_CHUNK
from bngrad_wire.limits import REGION_NBYTES

PATH = "/bngrad.v1.BatchNormGradService/FusedBatchNormGradV3"
REQUEST = request_of(inputs()).SerializeToString()
TOO_MANY_FIELDS = b"\x78\0" * 2**17
"""More fields than a message may have."""
INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = 3, 4, 8


class Closes(Protocol):
    def close(self) -> object: ...


class Service:
    """An HTTP/2 port on a Unix socket and on TCP, and its clients."""

    def __init__(
        self, directory: Path, authenticator: Authenticator = ALLOW_ALL, certificates: Certificates | None = None
    ) -> None:
        config = ServerConfig(arena_bytes=2**20, shared_bytes=REGION_NBYTES, max_requests=64, front_bytes=0)
        self.engine = Engine(config, lambda: None)
        self.servicer = Servicer(self.engine, authenticator)
        self.health = Health(("",))
        others = other_calls(self.servicer, self.health, has_reflection=False)
        self.port = Http2Port(self.servicer, others, self.health, certificates)
        self.worker = Adder(self.engine)
        self._path = str(directory / "calls")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._path)
        listener.listen(1024)
        self.port.listen_on_socket(listener)
        self._tcp = self.port.listen_on_port("127.0.0.1", 0)
        self.port.start()
        self._opened: list[Closes] = []
        self.engine.batcher.offer(self.worker)

    def socket(self, *, over_tcp: bool = False, source: str = "127.0.0.1", receive_nbytes: int = 0) -> socket.socket:
        """Over TCP, each source is a client of its own, and may have a small buffer for what it receives."""
        if over_tcp:
            sock = socket.socket()
            if receive_nbytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
            sock.bind((source, 0))
            sock.connect(("127.0.0.1", self._tcp))
        else:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self._path)
        sock.settimeout(TIMEOUT_S)
        self._opened.append(sock)
        return sock

    def connect(self, *, over_tcp: bool = False) -> http2.ClientConnection:
        connection = http2.ClientConnection(self.socket(over_tcp=over_tcp), "here")
        self._opened.append(connection)
        return connection

    @property
    def waiting(self) -> int:
        return len(self.engine.batcher._queue)

    @property
    def is_at_rest(self) -> bool:
        return self.engine.arena.used_bytes == 0 and self.engine.admission.admitted == 0

    def close(self) -> None:
        self.worker.may_run.set()
        for each in self._opened:
            each.close()
        self.port.stop(0)
        wait_until(lambda: self.is_at_rest)
        self.engine.close()
        self.worker.close()


def ask(
    connection: http2.ClientConnection,
    request: bytes = REQUEST,
    timeout_s: float | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> http2.ClientCall:
    call = connection.call(PATH, timeout_s=timeout_s, metadata=metadata)
    call.send_message(request, end=True)
    return call


def ask_by_chunks(
    connection: http2.ClientConnection, *, ticket: bytes = b"", more: bytes = b"", shape: tuple[int, ...] = SHAPE
) -> http2.ClientCall:
    """Asks by an exchange whose tensors come in a chunk each, but for x with a ticket; with ``more`` in another one."""
    arrays = inputs(shape=shape)
    request = request_of(arrays, chunked=True)
    tensors = [arrays[name].tobytes() for name in (("y_backprop",) if ticket else ("y_backprop", "x"))]
    if ticket:
        request.x.ticket = ticket
    parts = [(REQUEST_CHUNK.number, each) for each in tensors + [more] * bool(more)]
    return _send(connection, EXCHANGE_PATH, [(OPS[0].exchange_number, request.SerializeToString()), *parts])


def ticket_of_x(connection: http2.ClientConnection) -> bytes:
    """Sends x ahead."""
    header = request_of(inputs(), chunked=True).x.SerializeToString()
    call = _send(connection, SEND_AHEAD_PATH, [(1, header), (AHEAD_CHUNK.number, inputs()["x"].tobytes())])
    nbytes = call.receive_message()
    assert nbytes is not None
    answer = pb.SendAheadResponse.FromString(call.read(nbytes))
    assert call.receive_message() is None
    return answer.ticket


def _send(connection: http2.ClientConnection, path: str, parts: list[tuple[int, bytes]]) -> http2.ClientCall:
    """Sends messages of one field each, given by its number."""
    call = connection.call(path)
    for i, (number, part) in enumerate(parts):
        call.send_message(messages.field_prefix(number, len(part)), part, end=i == len(parts) - 1, more=True)
    connection.flush()
    return call


def check_answered_by_chunks(*calls: http2.ClientCall) -> None:
    for call in calls:
        parts = []
        while (nbytes := call.receive_message()) is not None:
            parts.append(pb.ExchangeResponse.FromString(call.read(nbytes)))
        head, *chunks = parts
        answer = head.fused_batch_norm_grad_v3
        check_answer(answer, b"".join(each.chunk for each in chunks), inputs())


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


def all_memory(service: Service) -> list[Block]:
    """Takes all blocks of the arena, so that calls wait for memory."""
    arena = service.engine.arena
    blocks = [arena.allocate(arena.nbytes, "other")]
    for nbytes in (arena.reserve_nbytes >> exponent for exponent in range(2, 16)):
        while (block := arena.allocate_at_once(nbytes, "other")) is not None:
            blocks.append(block)
    return blocks


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
    return len(service.port._calls._receiving)


def look_between_events(service: Service) -> None:
    """Waits until the event loop has ended what it does."""
    looked = threading.Event()
    service.port._event_loop.call_soon(looked.set)
    assert looked.wait(TIMEOUT_S)
