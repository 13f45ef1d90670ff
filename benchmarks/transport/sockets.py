"""Bare sockets that move the bytes of a call, two tensors there and one back: what their plain use takes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
from benchmarks.transport import Call, Prepare

from bngrad_kernels.problem import Problem
from bngrad_wire.addresses import host_and_port

_SIZE = struct.Struct("<Q")
"""Of the request that follows."""
_PART_NBYTES = 1 << 20
"""More in one system call made nothing faster."""


def start(address: str, threads: int, device: str) -> tuple[str, object]:
    """Serves for as long as the second object lives; the first is the address that clients take."""
    place = host_and_port(address)
    if place is None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.removeprefix("unix:"))
        listener.listen()
    else:
        listener = socket.create_server(place)
        address = f"{place[0]}:{listener.getsockname()[1]}"
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    return address, listener


def _accept(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve, args=(sock,), daemon=True).start()


def _serve(sock: socket.socket) -> None:
    """Answers each request with half as many bytes."""
    _send_at_once(sock)
    size, request = memoryview(bytearray(_SIZE.size)), memoryview(b"")
    with sock, contextlib.suppress(ConnectionError):
        while True:
            _receive(sock, size)
            (nbytes,) = _SIZE.unpack(size)
            if len(request) != nbytes:
                request = memoryview(bytearray(nbytes))
            _receive(sock, request)
            _send(sock, request[: nbytes // 2])


@contextlib.contextmanager
def connect(target: str) -> Iterator[Prepare]:
    @contextlib.contextmanager
    def prepare(problem: Problem) -> Iterator[Call]:
        tensors = [tensor.data.cast("B") for tensor in (problem.y_backprop, problem.x)]
        answer = np.empty_like(problem.x).data.cast("B")
        size = memoryview(_SIZE.pack(sum(map(len, tensors))))
        place = host_and_port(target)
        with socket.socket(socket.AF_UNIX if place is None else socket.AF_INET) as sock:
            sock.connect(target.removeprefix("unix:") if place is None else place)
            _send_at_once(sock)

            def call() -> None:
                for data in (size, *tensors):
                    _send(sock, data)
                _receive(sock, answer)

            yield call

    yield prepare


def _send_at_once(sock: socket.socket) -> None:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(sock: socket.socket, data: memoryview) -> None:
    while data:
        data = data[sock.send(data[:_PART_NBYTES]) :]


def _receive(sock: socket.socket, target: memoryview) -> None:
    while target:
        count = sock.recv_into(target[:_PART_NBYTES])
        if not count:
            raise ConnectionResetError
        target = target[count:]
