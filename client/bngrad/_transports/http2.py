"""Calls by the package's own HTTP/2: tensors go from their arrays to the socket and back without another copy."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc

from bngrad._credentials import NO_CREDENTIALS, Credentials
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import InternalError, ResourceExhaustedError, from_status
from bngrad._shared_memory.quarantine import AbandonedCall, stop_reading
from bngrad._transports.connection_pool import ConnectionPool, Lent, NotConnectedError
from bngrad._transports.connector import Address
from bngrad._transports.server_state import ServerState
from bngrad._transports.tracing import trace_context
from bngrad._transports.turns import NoTurnError, Turn, Turns
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import chunks, http2, messages
from bngrad_wire.fields import Buffer

_MAX_EXCHANGES = 32
"""Large ones at a time. More would share the server and the network until none is in time, and each that is not costs a
connection."""
_RETRY_S = 0.1
_LONG_TIMEOUT_S = 10.0
_LOOK_S = 1.0
"""How often a call with a long timeout looks whether the server is still there."""
_LOOKS = 8
"""How often one with a shorter timeout looks whether that has passed: a wait that moves a little begins again."""
_SHORTEST_LOOK_S = 0.05
_CHUNK_NBYTES = 2**28
_MAX_HEADER_NBYTES = 64 * 2**20
Result = TypeVar("Result")

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Http2Transport:
    """Makes calls to one address of a server, by connections that are reused.

    Attributes:
        address: Host and port, or the path of a Unix socket.
    """

    unary_below_nbytes = 256 * 1024
    """Tensors of at least this size are better exchanged in chunks."""

    def __init__(
        self,
        address: Address,
        target: str,
        credentials: Credentials = NO_CREDENTIALS,
        server: ServerState | None = None,
    ) -> None:
        """Connects to nothing yet; ``target`` is the server's name in errors, ``server`` its state."""
        self.address = address
        self._target = target
        self._credentials = credentials
        self._server = server or ServerState()
        self._connections = ConnectionPool(address, target, credentials, self._server.is_lost)
        self._turns = Turns(_MAX_EXCHANGES)

    def twin(self) -> Http2Transport:
        """Returns another transport to the same address, with connections of its own."""
        return Http2Transport(self.address, self._target, self._credentials, self._server)

    @property
    def was_connected(self) -> bool:
        """Whether there has ever been a connection."""
        return self._connections.was_connected

    def is_reachable(self) -> bool:
        """See `ConnectionPool.is_reachable`."""
        return self._connections.is_reachable()

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
        largest_nbytes = max(map(len, pieces), default=0)  # a response's tensors are as large as those of its request

        def talk(call: http2.ClientCall, set_timeout: Callable[[], object]) -> bytes:
            call.send_message(*pieces, end=True)
            set_timeout()
            if (responses := call.take_messages(largest_nbytes)) is None:
                return self._finished(call, self._message(call))
            if len(responses) == 1:
                return bytes(responses[0])
            raise InternalError(f"{self._target} answered with {len(responses)} messages, not one")

        return self._call(method, deadline, cancellation, talk, abandoned)

    def exchange(
        self,
        method: str,
        number: int,
        header: list[Buffer],
        tensors: Sequence[Buffer],
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
        targets_nbytes = sum(map(len, targets))

        def talk(call: http2.ClientCall, set_timeout: Callable[[], object]) -> bytes:
            requests: list[list[Buffer]] = [[messages.field_prefix(number, sum(map(len, header))), *header]]
            for tensor in tensors:
                requests += chunks.split(pb.ExchangeRequest.CHUNK_FIELD_NUMBER, tensor, _CHUNK_NBYTES)
            if not call.send_all(requests):
                for pieces in requests:
                    call.send_message(*pieces, more=True)
                call.half_close()
            set_timeout()
            responses = call.take_messages(targets_nbytes)
            source: chunks.MessageSource = call
            if responses is not None:
                source = chunks.WholeMessages(functools.partial(next, iter(responses), None))
            message = self._message(source)
            field = messages.only_field(message, len(message))
            if field is None or field[0] != number:
                raise InternalError(f"{self._target} did not send the response of the op")
            if responses is None:
                set_timeout()
            try:
                for target in targets:
                    chunks.receive(source, chunks.RESPONSE_CHUNK, target)
            except chunks.ChunkError as error:
                raise InternalError(f"{self._target} sent a malformed response: {error}") from error
            return self._finished(source, message[field[1] :])

        if sum(map(len, tensors)) + targets_nbytes < self.unary_below_nbytes:
            return self._call(method, deadline, cancellation, talk)
        turn = self._take_turn(deadline, cancellation)
        try:
            return self._call(method, deadline, cancellation, talk)
        finally:
            self._turns.give_back(turn)

    def send_ahead(
        self, method: str, message: bytes, tensor: memoryview, deadline: Deadline, cancellation: Cancellation
    ) -> bytes:
        """Sends a message and then a tensor in chunks; returns the response.

        Args:
            method: The path of the gRPC method.
            message: The message.
            tensor: The elements; may be empty.
            deadline: When to give up.
            cancellation: Lets another thread end the call.

        Raises:
            BngradError: The server's status, as an error.
            NotConnectedError: The server cannot be reached at this address.
        """

        def talk(call: http2.ClientCall, set_timeout: Callable[[], object]) -> bytes:
            call.send_message(message, more=True)
            for pieces in chunks.split(pb.SendAheadRequest.CHUNK_FIELD_NUMBER, tensor, _CHUNK_NBYTES):
                call.send_message(*pieces, more=True)
            call.half_close()
            set_timeout()
            return self._finished(call, self._message(call))

        return self._call(method, deadline, cancellation, talk)

    def close(self) -> None:
        """Closes the idle connections; those in use are closed when their calls end."""
        self._connections.close()

    def _take_turn(self, deadline: Deadline, cancellation: Cancellation) -> Turn:
        """Waits until another large exchange may begin."""
        try:
            return self._turns.take(deadline, cancellation)
        except NoTurnError as error:
            if cancellation.cancelled:
                raise NotConnectedError("the call was cancelled") from error
            reason = f"within half of its timeout of {deadline.timeout} s: {_MAX_EXCHANGES} calls before it still run"
            raise ResourceExhaustedError(f"no call to {self._target} could begin {reason}", _RETRY_S) from error

    def _call(
        self,
        method: str,
        deadline: Deadline,
        cancellation: Cancellation,
        talk: Callable[[http2.ClientCall, Callable[[], object]], Result],
        abandoned: AbandonedCall | None = None,
    ) -> Result:
        """Makes a call by ``talk``, which is given the call and what sets the timeout again before a long wait."""
        metadata = self._credentials.metadata() + trace_context()
        must_be_open = abandoned is not None
        while True:
            lent = self._connections.lend(deadline, cancellation, must_be_open=must_be_open)
            try:
                return self._call_on(lent, method, metadata, deadline, cancellation, talk, abandoned)
            except NotConnectedError:
                if lent.is_open or cancellation.cancelled:
                    raise
            must_be_open = True

    def _call_on(
        self,
        lent: Lent,
        method: str,
        metadata: Sequence[tuple[str, str]],
        deadline: Deadline,
        cancellation: Cancellation,
        talk: Callable[[http2.ClientCall, Callable[[], object]], Result],
        abandoned: AbandonedCall | None,
    ) -> Result:
        connection, io = lent.connection, lent.connection.io

        def set_timeout() -> float | None:
            remaining_s = _rounded(deadline.remaining_s())
            io.waits, look_s = _waits(remaining_s)
            io.set_timeout(look_s)
            return remaining_s

        cancellation.attach(functools.partial(http2.abort if abandoned is None else stop_reading, lent.sock))
        try:
            if abandoned is not None:
                abandoned.begin(lent.sock)
            remaining_s = set_timeout()
            io.deadline = math.inf if deadline.at is None else deadline.at
            result = talk(connection.call(method, timeout_s=remaining_s, metadata=metadata), set_timeout)
            self._server.hear(connection.load_text)
            connection.load_text = None
            return result
        except TimeoutError as error:
            code, message = grpc.StatusCode.DEADLINE_EXCEEDED, "no data came"
            raise from_status(code, message, b"", self._target, deadline.timeout) from error
        except http2.PeerLostError as error:  # another transport would wait for the same host
            raise from_status(grpc.StatusCode.UNAVAILABLE, str(error), b"", self._target, deadline.timeout) from error
        except ConnectionError as error:
            raise NotConnectedError(str(error)) from error
        except http2.RpcError as error:
            code = _STATUS_CODES.get(error.code, grpc.StatusCode.UNKNOWN)
            # Without its frames: they refer to the call, which keeps the error, and the cycle would keep all tensors.
            cause = error.with_traceback(None)
            raise from_status(code, error.message, error.details, self._target, deadline.timeout) from cause
        finally:
            cancellation.detach()
            io.deadline = math.inf
            self._connections.give_back(lent, abandoned)

    def _message(self, source: chunks.MessageSource) -> bytes:
        nbytes = source.receive_message()
        if nbytes is None or nbytes > _MAX_HEADER_NBYTES:
            raise InternalError(f"{self._target} answered with {'nothing' if nbytes is None else f'{nbytes} bytes'}")
        return source.read(nbytes)

    def _finished(self, source: chunks.MessageSource, message: bytes) -> bytes:
        """Returns the message once the server has ended the call with status OK."""
        if source.receive_message() is not None:
            raise InternalError(f"{self._target} sent more messages than the response has")
        return message


def _rounded(timeout_s: float | None) -> float | None:
    """Rounds long timeouts up to whole seconds: to repeat the timeout of the socket, and the header, is cheaper."""
    return math.ceil(timeout_s) if timeout_s is not None and timeout_s >= _LONG_TIMEOUT_S else timeout_s


def _waits(timeout_s: float | None) -> tuple[int, float]:
    """Returns how many waits in a row make up a timeout, and how long each is, in seconds."""
    if timeout_s is None:
        return sys.maxsize, _LOOK_S
    if timeout_s >= _LONG_TIMEOUT_S:
        return int(timeout_s / _LOOK_S), _LOOK_S
    waits = _LOOKS if timeout_s >= _LOOKS * _SHORTEST_LOOK_S else 1
    return waits, timeout_s / waits
