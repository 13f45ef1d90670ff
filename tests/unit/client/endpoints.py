"""Endpoints beside grpcio in this process: on TCP, on a Unix socket and with shared memory."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TypeAlias

import grpc
from tests.unit.client.peer import echoed, joined, nbytes_of, peer, split

from bngrad_kernels.spec import InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.memory.leases import LeaseServer
from bngrad_server.memory.regions import Regions
from bngrad_wire.http2 import RpcError, ServerCall, ServerConnection

SECONDS = 30.0
"""How long a test waits for what should come at once."""

CallAnswer: TypeAlias = Callable[[ServerCall], None]


class Endpoint:
    """Answers the calls of any number of connections."""

    def __init__(self, listener: socket.socket, answer: CallAnswer) -> None:
        name = listener.getsockname()
        self.address: tuple[str, int] | str = name if isinstance(name, str) else (name[0], name[1])
        self.connections = 0
        self._listener = listener
        self._answer = answer
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._begin(self._accept)

    def _begin(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                self._sockets.append(sock)
                self._begin(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(SECONDS)
        with suppress(ConnectionError, TimeoutError), closing(sock), closing(ServerConnection(sock)) as connection:
            while (call := connection.accept()) is not None:
                try:
                    self._answer(call)
                except RpcError as error:
                    call.end(error.code, error.message, error.details)
                except InvalidArgumentError as error:
                    call.end(3, str(error))

    def cut(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends every connection, and accepts no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(SECONDS)


@contextmanager
def full_listener(path: str | None = None) -> Iterator[socket.socket]:
    """Gives a listener whose queue is full, on a TCP port or a Unix socket.

    On TCP the system drops what asks for a connection, as a firewall does.
    """
    family = socket.AF_INET if path is None else socket.AF_UNIX
    with socket.socket(family) as listener, socket.socket(family) as first:
        listener.bind(("127.0.0.1", 0) if path is None else path)
        listener.listen(0)
        first.connect(listener.getsockname())
        yield listener


@contextmanager
def endpoint(answer: CallAnswer, path: str | None = None, host: str = "127.0.0.1") -> Iterator[Endpoint]:
    """Serves during the block, on a TCP port or a Unix socket."""
    if path is None:
        listener = socket.create_server((host, 0))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
    served = Endpoint(listener, answer)
    try:
        yield served
    finally:
        served.close()


def message_of(call: ServerCall) -> bytes | None:
    nbytes = call.receive_message()
    return None if nbytes is None else call.read(nbytes)


def answer_by(answer: Callable[[str, bytes], bytes]) -> CallAnswer:
    """Answers calls and exchanges, given the method's name and the request."""

    def answer_call(call: ServerCall) -> None:
        method = call.path.rpartition("/")[2]
        if method == "Exchange":
            method, request = joined(iter(lambda: message_of(call), None))
            for message in split(method, answer(method, request)):
                call.send_message(message, more=True)
        else:
            call.send_message(answer(method, message_of(call) or b""), more=True)
        call.end()

    return answer_call


class Server:
    """A server with every endpoint, which answers FusedBatchNormGradV2 with its x.

    Attributes:
        ways: The way that each call came: "grpc", "tcp", "local" or "shared".
        on_arrival: Called with the way of each call before anything is done for it.
        on_call: Called with the way of each call before it is answered.
        on_info: Called before the endpoints are told.
        on_ahead: Called before SendAhead is answered.
        ahead: What came by SendAhead; the tickets are their numbers.
        tickets: The ticket of x in each call in shared memory.
    """

    target: str
    tcp: Endpoint
    local: Endpoint

    def __init__(self, max_shared_nbytes: int) -> None:
        self.ways: list[str] = []
        self.on_ahead: Callable[[], None] = lambda: None
        self.ahead: list[pb.SendAheadRequest] = []
        self.tickets: list[bytes] = []
        self.infos = 0
        self.on_arrival: Callable[[str], None] = lambda way: None
        self.on_call: Callable[[str], None] = lambda way: None
        self.on_info: Callable[[], None] = lambda: None
        self.regions = Regions(max_shared_nbytes, lambda region: None, lambda region: None)
        self.sockets = LeaseServer(self.regions, None)
        self.endpoints = pb.Endpoints(local_directory=str(self.sockets.directory))

    def answer_grpc(self, method: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        if method == "ServerInfo":
            self.infos += 1
            self.on_info()
            return pb.ServerInfoResponse(version="1.2.3", endpoints=self.endpoints).SerializeToString()
        return self._answer("grpc", request)

    def answer_on(self, way: str) -> CallAnswer:
        return answer_by(
            lambda method, request: self._send_ahead(request) if method == "SendAhead" else self._answer(way, request)
        )

    def _send_ahead(self, request: bytes) -> bytes:
        self.on_ahead()
        self.ahead.append(pb.SendAheadRequest.FromString(request))
        return pb.SendAheadResponse(ticket=b"%d" % len(self.ahead)).SerializeToString()

    def _answer(self, way: str, request: bytes) -> bytes:
        self.on_arrival(way)
        sent = pb.FusedBatchNormGradV2Request.FromString(request)
        if sent.HasField("x_backprop_location"):
            source, x = self.regions.hold("x", sent.x.location, 0)
            target, x_backprop = self.regions.hold("x_backprop", sent.x_backprop_location, 0)
            try:
                elements = os.pread(source.fd, nbytes_of(sent.x), x.offset)
                self._note("shared")
                os.pwrite(target.fd, elements, x_backprop.offset)
            finally:
                self.regions.release(source)
                self.regions.release(target)
            self.tickets.append(sent.x.ticket)
            sent.x.ClearField("location")
            sent.x.ClearField("ticket")
        else:
            self._note(way)
        return echoed(sent)

    def _note(self, way: str) -> None:
        self.on_call(way)
        self.ways.append(way)


@contextmanager
def server(max_shared_nbytes: int = 2**30) -> Iterator[Server]:
    made = Server(max_shared_nbytes)
    made.sockets.start()
    try:
        with endpoint(made.answer_on("tcp")) as made.tcp, peer(made.answer_grpc) as made.target:
            made.local = Endpoint(made.sockets.calls, made.answer_on("local"))
            made.endpoints.stream_port = int(made.tcp.address[1])
            try:
                yield made
            finally:
                made.local.close()
    finally:
        made.sockets.close()
