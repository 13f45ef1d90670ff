"""Calls by the package's own HTTP/2: tensors go from their arrays to the socket and back without another copy."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
from collections.abc import Iterator

import grpc

from bngrad._credentials import NO_CREDENTIALS, Credentials
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import InternalError, from_status
from bngrad._shared_memory.quarantine import AbandonedCall, stop_reading
from bngrad._transports.tracing import trace_context
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import http2, messages
from bngrad_wire.messages import Buffer

_CONNECT_TIMEOUT_S = 5.0
_MAX_IDLE = 64
_LONG_TIMEOUT_S = 10.0
_CHUNK_NBYTES = 2**28
_MAX_HEADER_NBYTES = 64 * 2**20
_RESET = struct.pack("ii", 1, 0)
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class NotConnectedError(Exception):
    """The server does not answer at this address, or the connection was lost; another transport may make the call."""


class Http2Transport:
    """Reused connections to one address of a server; each serves one call at a time.

    Attributes:
        address: Host and port, or the path of a Unix socket.
    """

    unary_below_nbytes = 256 * 1024
    """Tensors of at least this size are better exchanged in chunks."""

    def __init__(self, address: tuple[str, int] | str, target: str, credentials: Credentials = NO_CREDENTIALS) -> None:
        """Connects to nothing yet; ``target`` is the server's name in errors."""
        self.address = address
        self._target = target
        self._credentials = credentials
        self._idle: list[tuple[http2.ClientConnection, socket.socket]] = []
        self._mutex = threading.Lock()
        self._closed = False

    def is_reachable(self) -> bool:
        """Connects, keeps the connection for the next call, and returns whether that worked."""
        try:
            self._release(*self._connection(Deadline.after(_CONNECT_TIMEOUT_S)))
        except NotConnectedError:
            return False
        return True

    def unary(
        self,
        method: str,
        pieces: list[Buffer],
        deadline: Deadline,
        cancellation: Cancellation,
        abandoned: AbandonedCall | None = None,
    ) -> bytes:
        """Sends one message, and returns the response.

        Args:
            method: The path of the gRPC method.
            pieces: The message.
            deadline: When to give up.
            cancellation: Lets another thread end the call.
            abandoned: Takes over the connection if the call is given up; for calls that name shared memory.

        Raises:
            BngradError: The server's status, as an error.
            NotConnectedError: The server cannot be reached at this address.
        """
        with self._call(method, deadline, cancellation, abandoned) as (call, sock):
            call.send_message(*pieces, end=True)
            http2.set_timeout(sock, deadline.remaining_s())
            return self._finished(call, self._message(call))

    def exchange(
        self,
        method: str,
        number: int,
        header: list[Buffer],
        tensors: list[memoryview],
        targets: list[memoryview],
        deadline: Deadline,
        cancellation: Cancellation,
    ) -> bytes:
        """Makes a call whose large tensors travel in chunks, each way after a message with the rest.

        Args:
            method: The path of the gRPC method.
            number: The number of the op's field in both messages.
            header: The request without the elements of its large tensors.
            tensors: The elements of these.
            targets: Buffers that are filled with the elements of the response's large tensors.
            deadline: When to give up.
            cancellation: Lets another thread end the call.

        Returns:
            The response without the elements of its large tensors.

        Raises:
            BngradError: The server's status, as an error.
            NotConnectedError: The server cannot be reached at this address.
        """
        with self._call(method, deadline, cancellation) as (call, sock):
            call.send_message(messages.field_prefix(number, sum(map(len, header))), *header, more=True)
            for tensor in tensors:
                for pieces in messages.chunks(pb.ExchangeRequest.CHUNK_FIELD_NUMBER, tensor, _CHUNK_NBYTES):
                    call.send_message(*pieces, more=True)
            call.half_close()
            http2.set_timeout(sock, deadline.remaining_s())
            message = self._message(call)
            field = messages.only_field(message, len(message))
            if field is None or field[0] != number:
                raise InternalError(f"{self._target} did not send the response of the op")
            http2.set_timeout(sock, deadline.remaining_s())
            try:
                for target in targets:
                    messages.receive_chunks(call, pb.ExchangeResponse.CHUNK_FIELD_NUMBER, target)
            except messages.ChunkError as error:
                raise InternalError(f"{self._target} sent a malformed response: {error}") from error
            return self._finished(call, message[field[1] :])

    def close(self) -> None:
        """Closes the idle connections; those in use are closed when their calls end."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    @contextlib.contextmanager
    def _call(
        self, method: str, deadline: Deadline, cancellation: Cancellation, abandoned: AbandonedCall | None = None
    ) -> Iterator[tuple[http2.ClientCall, socket.socket]]:
        """Gives a call and its socket, whose timeout must be set again before each long wait."""
        metadata = self._credentials.metadata() + trace_context()
        connection, sock = self._connection(deadline)
        end = _reset if abandoned is None else stop_reading
        try:
            with cancellation.calls(lambda: end(sock)):
                remaining_s = deadline.remaining_s()
                http2.set_timeout(sock, remaining_s)
                connection.io.deadline = math.inf if deadline.at is None else deadline.at
                yield connection.call(method, timeout_s=_announced(remaining_s), metadata=metadata), sock
        except TimeoutError as error:
            code, message = grpc.StatusCode.DEADLINE_EXCEEDED, "no data came"
            raise from_status(code, message, b"", self._target, deadline.timeout) from error
        except ConnectionError as error:
            raise NotConnectedError(str(error)) from error
        except http2.RpcError as error:
            code = _STATUS_CODES.get(error.code, grpc.StatusCode.UNKNOWN)
            # Without its frames: they refer to the call, which keeps the error, and the cycle would keep all tensors.
            cause = error.with_traceback(None)
            raise from_status(code, error.message, error.details, self._target, deadline.timeout) from cause
        finally:
            connection.io.deadline = math.inf
            self._release(connection, sock, abandoned)

    def _connection(self, deadline: Deadline) -> tuple[http2.ClientConnection, socket.socket]:
        while True:
            with self._mutex:
                if not self._idle:
                    break
                connection, sock = self._idle.pop()
            if connection.usable:
                return connection, sock
            connection.close()
        remaining_s = deadline.remaining_s()
        # Half of what is left, so that another transport may still make the call.
        timeout_s = _CONNECT_TIMEOUT_S if remaining_s is None else min(remaining_s / 2, _CONNECT_TIMEOUT_S)
        try:
            sock = _connected(self.address, timeout_s, self._credentials)
        except OSError as error:
            raise NotConnectedError(f"{self.address}: {error}") from error
        try:
            return http2.ClientConnection(sock, self._target if isinstance(self.address, tuple) else "localhost"), sock
        except ConnectionError as error:
            raise NotConnectedError(str(error)) from error

    def _release(
        self, connection: http2.ClientConnection, sock: socket.socket, abandoned: AbandonedCall | None = None
    ) -> None:
        with self._mutex:
            is_usable = connection.usable
            if is_usable and not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append((connection, sock))
                return
        if is_usable or abandoned is None:
            connection.close()
        else:
            connection.stream = None  # as `close` would do
            abandoned.abandon(sock)

    def _message(self, call: http2.ClientCall) -> bytes:
        nbytes = call.receive_message()
        if nbytes is None or nbytes > _MAX_HEADER_NBYTES:
            raise InternalError(f"{self._target} answered with {'nothing' if nbytes is None else f'{nbytes} bytes'}")
        return call.read(nbytes)

    def _finished(self, call: http2.ClientCall, message: bytes) -> bytes:
        """Returns the message once the server has ended the call with status OK."""
        if call.receive_message() is not None:
            raise InternalError(f"{self._target} sent more messages than the response has")
        return message


def _announced(timeout_s: float | None) -> float | None:
    """Rounds long timeouts up to whole seconds for the ``grpc-timeout`` header: repeated headers are cheaper."""
    return math.ceil(timeout_s) if timeout_s is not None and timeout_s >= _LONG_TIMEOUT_S else timeout_s


def _connected(address: tuple[str, int] | str, timeout_s: float, credentials: Credentials) -> socket.socket:
    if isinstance(address, tuple):
        return credentials.secured(socket.create_connection(address, timeout_s))
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Closing then sends an RST; else a server would wait a minute for us to read its answer.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.shutdown(socket.SHUT_RDWR)
