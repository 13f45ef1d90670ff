"""Peers for the tests of http2: this package's in threads, raw bytes, and grpcio's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import grpc

from bngrad_wire.http2 import ClientConnection, PeerGoneError, RpcError, ServerCall, ServerConnection, set_timeout
from bngrad_wire.http2.frames import PREFACE, settings

TIMEOUT_S = 30.0
SIZES = [0, 1, 5, 64 * 1024, 20 * 2**20]
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
HELLO = PREFACE + settings({})


def echo(call: ServerCall) -> None:
    """Answers every message with itself; a path that ends in "fail" ends with a status."""
    while (size := call.receive_message()) is not None:
        message = bytearray(size)
        call.read_into(memoryview(message))
        call.send_message(message, more=True)
    if call.path.endswith("fail"):
        call.end(3, "naïve 100%\n", b"\x00details")
    call.end()


def carrier(call: ServerCall) -> ServerConnection:
    """The connection that carries a call."""
    connection = call._connection
    assert isinstance(connection, ServerConnection)
    return connection


def lending_echo(call: ServerCall) -> None:
    """Does as `echo`, and lends its memory to a client of this user."""
    call.lends_memory = True
    echo(call)


def serve(sock: socket.socket, answer: Callable[[ServerCall], None] = echo) -> None:
    """Answers the calls of one connection until its client closes it."""
    set_timeout(sock, TIMEOUT_S)
    with sock:
        connection = ServerConnection(sock)
        with closing(connection):
            while (call := connection.accept()) is not None:
                try:
                    answer(call)
                except RpcError as error:
                    call.end(error.code, error.message)


def serve_until_gone(sock: socket.socket, answer: Callable[[ServerCall], None] = echo) -> None:
    """Does as `serve`, but ignores that the client disconnects."""
    with suppress(PeerGoneError):
        serve(sock, answer)


@contextmanager
def in_thread(target: Callable[..., object], *args: Any) -> Iterator[None]:
    """Runs ``target`` in a thread beside the block; raises what it raised."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(target, *args)
        yield
        future.result(TIMEOUT_S)


def pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Returns two connected sockets of kind "unix" or "tcp"."""
    if kind == "unix":
        near, far = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
    near.settimeout(TIMEOUT_S)
    far.settimeout(TIMEOUT_S)
    return near, far


@contextmanager
def client(kind: str = "unix", answer: Callable[[ServerCall], None] = echo) -> Iterator[ClientConnection]:
    """A client of this package, connected to a server of this package in a thread."""
    near, far = pair(kind)
    with in_thread(serve_until_gone, far, answer), closing(ClientConnection(near, "localhost")) as connection:
        yield connection


@contextmanager
def listening(answer: Callable[[ServerCall], None] = echo) -> Iterator[str]:
    """A server of this package, with a thread for each connection; yields its address."""
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                sock, _ = listener.accept()
                if stopping.is_set():
                    sock.close()
                    return
                threads.append(threading.Thread(target=serve_until_gone, args=(sock, answer)))
                threads[-1].start()

        stopping = threading.Event()
        address = listener.getsockname()
        with in_thread(accept):
            try:
                yield f"127.0.0.1:{address[1]}"
            finally:
                stopping.set()
                socket.create_connection(address).close()
    for thread in threads:
        thread.join(TIMEOUT_S)


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, answer: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]) -> None:
        self._answer = answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.stream_stream_rpc_method_handler(self._answer)


@contextmanager
def grpcio_server(
    answer: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]],
) -> Iterator[ClientConnection]:
    """A client of this package, connected to a server of grpcio."""
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[_Handler(answer)], options=UNLIMITED)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            sock = socket.create_connection(("127.0.0.1", port))
            sock.settimeout(TIMEOUT_S)
            with closing(ClientConnection(sock, "localhost")) as connection:
                yield connection
        finally:
            server.stop(None).wait()


def answered(data: bytes) -> bytes:
    """Returns what the echo server sends to a client that sends ``data`` and closes; raises what the server raises."""
    near, far = pair("unix")
    answer = bytearray()

    def hear() -> None:
        with suppress(ConnectionResetError):
            while chunk := near.recv(65536):
                answer.extend(chunk)

    with near:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        with in_thread(hear):
            serve(far)
    return bytes(answer)


def heard(*steps: tuple[bytes, bytes]) -> bytes:
    """Returns what the echo server sends to a client that sends bytes, waits for others, and goes on so."""
    near, far = pair("unix")
    answer = bytearray()
    with in_thread(serve_until_gone, far), near:
        for data, until in steps:
            with in_thread(near.sendall, data):
                while until not in answer:
                    chunk = near.recv(65536)
                    assert chunk, "the connection ended"
                    answer += chunk
    return bytes(answer)


def unary(connection: ClientConnection, message: bytes = b"", path: str = "/echo.Echo/echo") -> bytes:
    """Makes a call with one message each way."""
    call = connection.call(path)
    call.send_message(message, end=True)
    size = call.receive_message()
    assert size is not None
    answer = call.read(size)
    assert call.receive_message() is None
    return answer


def called(data: bytes) -> bytes:
    """Makes a call to a server that sends ``data`` and closes; raises what the client raises."""
    near, far = pair("unix")
    with far:
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        with closing(ClientConnection(near, "localhost")) as connection:
            return unary(connection, b"hello")


def unary_of(channel: grpc.Channel, path: str) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
    return channel.unary_unary(path)
