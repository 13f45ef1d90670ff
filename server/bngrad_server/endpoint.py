"""The endpoint for large tensors and for clients on this host: the same calls as on grpcio, at a fraction of the cost.

It speaks gRPC by `bngrad_protos.http2`, whose bytes go from the socket into the arena and back without a copy between.
A thread serves each connection, one call at a time.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from bngrad_protos import http2, wire
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.calls import SERVICE, UNARY_OPS, Calls, chunk_of, exchange_error
from bngrad_server.engine import Patience, copy
from bngrad_server.errors import status_of

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512
"""More are closed at once; their clients fall back to grpcio."""
_STALL_TIMEOUT_S = 60.0
"""How long a peer may stand still in the middle of a frame or a call."""
_SHORTEST_TIMEOUT_S = 1e-3
"""A socket takes 0 for not waiting at all."""
_END_TIMEOUT_S = 1.0
_MAX_HEADER_NBYTES = 64 * 2**20
_CHUNK_NBYTES = 4 * 2**20 - 64
"""The largest chunk that fits a stock client's default limit for messages."""
_OWN_CHUNK_NBYTES = 2**28
"""For our own client, which does not hold a message in memory."""

_UNIMPLEMENTED = 12
_RESOURCE_EXHAUSTED = 8


class Endpoint:
    """Listens on sockets of its own."""

    def __init__(self, calls: Calls) -> None:
        prefix = f"/{SERVICE.full_name}/"
        self._calls = calls
        self._ops = {prefix + name: name for name in UNARY_OPS}
        self._exchange = prefix + "Exchange"
        self._listeners: list[socket.socket] = []
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._idle: set[socket.socket] = set()
        self._mutex = threading.Lock()
        self._stopping = threading.Event()

    def listen_on_port(self, host: str, port: int) -> int:
        """Listens on a TCP port, and returns it.

        Raises:
            OSError: It is taken, or not ours.
        """
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        dualstack = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=dualstack)
        self._listeners.append(listener)
        bound: int = listener.getsockname()[1]
        return bound

    def listen_on_socket(self, listener: socket.socket) -> None:
        """Listens on a socket that is bound already."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Accepts connections."""
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="endpoint", daemon=True).start()

    def stop(self, drain_timeout_s: float) -> None:
        """Takes no more calls, and lets those in flight end in time."""
        self._stopping.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._end(self._idle)
        deadline = time.monotonic() + drain_timeout_s
        for thread in list(self._connections.values()):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._end(self._connections)
        for thread in list(self._connections.values()):
            thread.join(_END_TIMEOUT_S)

    def _end(self, connections: Iterable[socket.socket]) -> None:
        with self._mutex:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                logger.warning("cannot accept a connection: %s", error)
                time.sleep(0.1)  # out of file descriptors, mostly
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="connection", daemon=True)
            with self._mutex:
                if len(self._connections) >= _MAX_CONNECTIONS or self._stopping.is_set():
                    connection.close()
                    continue
                self._connections[connection] = thread
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_STALL_TIMEOUT_S)
            with contextlib.closing(http2.ServerConnection(sock)) as connection:
                for call in self._calls_of(connection, sock):
                    self._answer(call)
        except (ConnectionError, TimeoutError) as error:
            logger.debug("a connection ended: %s", error)
        except Exception:
            logger.exception("a connection failed")
        finally:
            with self._mutex:
                del self._connections[sock]
            sock.close()

    def _calls_of(self, connection: http2.ServerConnection, sock: socket.socket) -> Iterator[http2.ServerCall]:
        while True:
            with self._mutex:
                if self._stopping.is_set():
                    return
                self._idle.add(sock)
            sock.settimeout(_STALL_TIMEOUT_S)
            try:
                call = connection.accept()
            except TimeoutError:
                continue  # between two calls; in the middle of a frame, the next one fails
            finally:
                with self._mutex:
                    self._idle.discard(sock)
            if call is None:
                return
            # A client that stands still past its deadline must not keep its memory.
            sock.settimeout(_STALL_TIMEOUT_S if call.timeout_s is None else _clamped(call.timeout_s))
            yield call

    def _answer(self, call: http2.ServerCall) -> None:
        deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        patience = Patience(deadline, _is_over(call))
        try:
            if call.path in self._ops:
                self._answer_unary(call, self._ops[call.path], patience)
            elif call.path == self._exchange:
                for pieces in self._calls.exchange(_Source(call), patience):
                    call.send_message(*pieces)
                call.end()
            else:
                call.end(_UNIMPLEMENTED, f"{call.path} is not served here")
        except ConnectionError:
            raise
        except http2.RpcError as error:  # the client has reset the call, and may make others
            call.end(error.code, error.message)
        except Exception as error:
            code, status = status_of(error)
            call.end(code.value[0], status.message, status.SerializeToString())

    def _answer_unary(self, call: http2.ServerCall, op: str, patience: Patience) -> None:
        nbytes = call.receive_message()
        if nbytes is None or nbytes > _MAX_HEADER_NBYTES:
            limit = f"must have at most {_MAX_HEADER_NBYTES} bytes here; larger ones go by Exchange"
            call.end(_RESOURCE_EXHAUSTED, f"the request {limit}")
            return
        with self._calls.answer(op, call.read(nbytes), patience) as pieces:
            call.send_message(*pieces, more=True)
            call.end()


def _is_over(call: http2.ServerCall) -> Callable[[], bool]:
    """Tells any thread whether the client has given up; only the call's own may look at the connection meanwhile."""
    owner = threading.get_ident()
    return lambda: call.cancelled() if threading.get_ident() == owner else call.failure is not None


class _Source:
    """The client's side of an exchange on `bngrad_protos.http2`."""

    def __init__(self, call: http2.ServerCall) -> None:
        self._call = call
        is_own = call.metadata.get("user-agent") == "bngrad"
        self.chunk_nbytes = _OWN_CHUNK_NBYTES if is_own else _CHUNK_NBYTES

    def receive(self) -> bytes | None:
        nbytes = self._call.receive_message()
        if nbytes is None:
            return None
        if nbytes > _MAX_HEADER_NBYTES:
            raise exchange_error(f"a request must have at most {_MAX_HEADER_NBYTES} bytes beside its chunks")
        return self._call.read(nbytes)

    def receive_into(self, target: memoryview) -> None:
        start = 0
        while start < len(target):
            nbytes = self._call.receive_message()
            if nbytes is None:
                raise exchange_error(f"{len(target) - start} bytes of chunks are missing")
            start += self._receive_chunk(target[start:], nbytes)

    def _receive_chunk(self, target: memoryview, nbytes: int) -> int:
        """Reads a message straight into the target, and gives the size of its chunk."""
        call = self._call
        head = call.read(min(nbytes, wire.PREFIX_NBYTES))
        field = wire.only_field(head, nbytes)
        if field is None or field[0] != pb.ExchangeRequest.CHUNK_FIELD_NUMBER:
            if nbytes > _MAX_HEADER_NBYTES:
                raise exchange_error("a chunk must be the only field of its message")
            chunk = chunk_of(head + call.read(nbytes - len(head)))
            _check_fits(len(chunk), target)
            copy(target[: len(chunk)], chunk)
            return len(chunk)
        size = nbytes - field[1]
        _check_fits(size, target)
        first = head[field[1] :]
        target[: len(first)] = first
        call.read_into(target[len(first) : size])
        return size


def _clamped(timeout_s: float) -> float:
    return min(max(timeout_s, _SHORTEST_TIMEOUT_S), _STALL_TIMEOUT_S)


def _check_fits(nbytes: int, target: memoryview) -> None:
    if nbytes > len(target):
        raise exchange_error(f"a chunk has {nbytes - len(target)} bytes more than its tensor")
