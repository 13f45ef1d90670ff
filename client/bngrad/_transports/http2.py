"""Calls on a server's own endpoint: tensors go from their arrays to the socket and back without a copy between."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
from collections.abc import Iterator

import grpc

from bngrad._cancellation import Cancellation
from bngrad._credentials import OPEN, Access
from bngrad._deadline import Deadline
from bngrad._errors import InternalError, from_status
from bngrad._shared_memory.farewell import Farewell, silence
from bngrad._transports.tracing import trace_context
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import http2, messages
from bngrad_wire.messages import Buffer

_CONNECT_TIMEOUT_S = 5.0
_MAX_IDLE = 64
_LONG_S = 10.0
_CHUNK_NBYTES = 2**28
_MAX_HEADER_NBYTES = 64 * 2**20
_RESET = struct.pack("ii", 1, 0)
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class NotConnectedError(Exception):
    """Nobody answers at the endpoint, or the connection was lost; the call may be made in another way."""


class DirectEndpoint:
    """Connections to an endpoint, reused; each serves one call at a time.

    Attributes:
        address: Host and port, or the path of a Unix socket.
    """

    unary_below_nbytes = 256 * 1024
    """Tensors of at least this size are better exchanged in chunks."""

    def __init__(self, address: tuple[str, int] | str, target: str, access: Access = OPEN) -> None:
        """Connects to nothing yet.

        Args:
            address: Host and port, or the path of a Unix socket.
            target: What the caller knows the server as, for errors.
            access: How the server is reached.
        """
        self.address = address
        self._target = target
        self._access = access
        self._idle: list[tuple[http2.ClientConnection, socket.socket]] = []
        self._mutex = threading.Lock()
        self._closed = False

    def is_there(self) -> bool:
        """Whether the endpoint can be reached; where it can, the connection is kept."""
        try:
            self._give_back(*self._connection(Deadline.after(_CONNECT_TIMEOUT_S)))
        except NotConnectedError:
            return False
        return True

    def unary(
        self,
        method: str,
        pieces: list[Buffer],
        deadline: Deadline,
        cancellation: Cancellation,
        farewell: Farewell | None = None,
    ) -> bytes:
        """Sends one message, and returns the one that comes back.

        Args:
            method: The path of the gRPC method.
            pieces: The message.
            deadline: When to give up.
            cancellation: Where to hear that the caller has.
            farewell: Is said where the call is given up, for one on a Unix socket that names memory.

        Raises:
            BngradError: The server's status, as an error.
            NotConnectedError: The endpoint cannot be reached.
        """
        with self._call(method, deadline, cancellation, farewell) as (call, sock):
            call.send_message(*pieces, end=True)
            http2.set_timeout(sock, deadline.rest_s())
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
        """Makes one exchange.

        Args:
            method: The path of the gRPC method.
            number: The number of the op's field in both messages.
            header: The request without the elements of its large tensors.
            tensors: Those.
            targets: Are filled with the elements of the response's large tensors.
            deadline: When to give up.
            cancellation: Where to hear that the caller has.

        Returns:
            The response without those.

        Raises:
            BngradError: The server's status, as an error.
            NotConnectedError: The endpoint cannot be reached.
        """
        with self._call(method, deadline, cancellation) as (call, sock):
            call.send_message(messages.field_prefix(number, sum(map(len, header))), *header, more=True)
            for tensor in tensors:
                for pieces in messages.chunks(pb.ExchangeRequest.CHUNK_FIELD_NUMBER, tensor, _CHUNK_NBYTES):
                    call.send_message(*pieces, more=True)
            call.half_close()
            http2.set_timeout(sock, deadline.rest_s())
            message = self._message(call)
            field = messages.only_field(message, len(message))
            if field is None or field[0] != number:
                raise InternalError(f"{self._target} did not answer an exchange with the response of its op")
            http2.set_timeout(sock, deadline.rest_s())
            for target in targets:
                self._receive_into(call, target)
            return self._finished(call, message[field[1] :])

    def close(self) -> None:
        """Closes every connection that is idle; those in use are closed when their calls end."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    @contextlib.contextmanager
    def _call(
        self, method: str, deadline: Deadline, cancellation: Cancellation, farewell: Farewell | None = None
    ) -> Iterator[tuple[http2.ClientCall, socket.socket]]:
        """Lends a call and its socket, whose timeout is to be set again for each long wait."""
        metadata = self._access.metadata() + trace_context()
        connection, sock = self._connection(deadline)
        end = _shut_down if farewell is None else silence
        try:
            with cancellation.calls(lambda: end(sock)):
                rest_s = deadline.rest_s()
                http2.set_timeout(sock, rest_s)
                connection.io.deadline = math.inf if deadline.at is None else deadline.at
                yield connection.call(method, timeout_s=_announced(rest_s), metadata=metadata), sock
        except TimeoutError as error:
            message = "it stands still"
            raise from_status(
                grpc.StatusCode.DEADLINE_EXCEEDED, message, b"", self._target, deadline.timeout
            ) from error
        except ConnectionError as error:
            raise NotConnectedError(str(error)) from error
        except http2.RpcError as error:
            code = _STATUS_CODES.get(error.code, grpc.StatusCode.UNKNOWN)
            # Without its frames, which have the call, which keeps the error: all tensors would wait for the collector.
            cause = error.with_traceback(None)
            raise from_status(code, error.message, error.details, self._target, deadline.timeout) from cause
        finally:
            connection.io.deadline = math.inf
            self._give_back(connection, sock, farewell)

    def _connection(self, deadline: Deadline) -> tuple[http2.ClientConnection, socket.socket]:
        while True:
            with self._mutex:
                if not self._idle:
                    break
                connection, sock = self._idle.pop()
            if connection.usable:
                return connection, sock
            connection.close()
        rest_s = deadline.rest_s()
        # Half of what is left, so that the call may still be made in another way.
        timeout_s = _CONNECT_TIMEOUT_S if rest_s is None else min(rest_s / 2, _CONNECT_TIMEOUT_S)
        try:
            sock = _connected(self.address, timeout_s, self._access)
        except OSError as error:
            raise NotConnectedError(f"{self.address}: {error}") from error
        try:
            return http2.ClientConnection(sock, self._target if isinstance(self.address, tuple) else "localhost"), sock
        except ConnectionError as error:
            raise NotConnectedError(str(error)) from error

    def _give_back(
        self, connection: http2.ClientConnection, sock: socket.socket, farewell: Farewell | None = None
    ) -> None:
        with self._mutex:
            is_usable = connection.usable
            if is_usable and not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append((connection, sock))
                return
        if is_usable or farewell is None:
            connection.close()
        else:
            connection.stream = None  # as `close` would do
            farewell.say(sock)

    def _message(self, call: http2.ClientCall) -> bytes:
        nbytes = call.receive_message()
        if nbytes is None or nbytes > _MAX_HEADER_NBYTES:
            raise InternalError(f"{self._target} answered with {'nothing' if nbytes is None else f'{nbytes} bytes'}")
        return call.read(nbytes)

    def _finished(self, call: http2.ClientCall, message: bytes) -> bytes:
        """Returns the message once the server has said that all went well."""
        if call.receive_message() is not None:
            raise InternalError(f"{self._target} answered with more than was asked for")
        return message

    def _receive_into(self, call: http2.ClientCall, target: memoryview) -> None:
        start = 0
        while start < len(target):
            nbytes = call.receive_message()
            head = b"" if nbytes is None else call.read(min(nbytes, messages.PREFIX_NBYTES))
            field = None if nbytes is None else messages.only_field(head, nbytes)
            if nbytes is None or field is None or field[0] != pb.ExchangeResponse.CHUNK_FIELD_NUMBER:
                raise InternalError(f"{self._target} answered with something else than the chunks of the answer")
            first, end = head[field[1] :], start + nbytes - field[1]
            if end > len(target):
                raise InternalError(f"{self._target} answered with {end - len(target)} bytes too many")
            target[start : start + len(first)] = first
            call.read_into(target[start + len(first) : end])
            start = end


def _announced(rest_s: float | None) -> float | None:
    """What the server is told of a deadline: long ones in whole seconds, since headers that repeat are cheaper."""
    return math.ceil(rest_s) if rest_s is not None and rest_s >= _LONG_S else rest_s


def _connected(address: tuple[str, int] | str, timeout_s: float, access: Access) -> socket.socket:
    if isinstance(address, tuple):
        return access.secured(socket.create_connection(address, timeout_s))
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # A server that waits for an answer to be read would wait on, for a minute, were it not for the RST of this.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.shutdown(socket.SHUT_RDWR)
