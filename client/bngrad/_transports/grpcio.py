"""Calls on grpcio: slower than a server's own endpoint, and possible wherever gRPC is."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np

from bngrad._cancellation import Cancellation
from bngrad._credentials import Access
from bngrad._deadline import Deadline
from bngrad._errors import InternalError, UnavailableError, from_rpc_error, from_status
from bngrad._transports.tracing import trace_context
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import messages as wire
from bngrad_wire.messages import Buffer

_BLOCKING_NBYTES = 64 * 1024
"""grpcio's blocking call ends, whatever its deadline, when the system has taken the message; it takes small ones."""
_CHUNK_NBYTES = 2**20
"""grpcio is fastest with chunks of about this size: smaller ones cost calls, larger ones the cache."""


class GrpcEndpoint:
    """A gRPC channel; calls like `bngrad._transports.http2.DirectEndpoint`."""

    unary_below_nbytes = 2**20
    """Tensors of at least this size are better exchanged in chunks."""

    def __init__(self, channel: grpc.Channel, target: str, access: Access) -> None:
        self._channel = channel
        self._target = target
        self._access = access
        self._unary: dict[str, grpc.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    def unary(self, method: str, pieces: list[Buffer], deadline: Deadline, cancellation: Cancellation) -> bytes:
        """Sends one message, and returns the one that comes back.

        Raises:
            BngradError: The status, as an error.
        """
        callable_ = self._unary.get(method)
        if callable_ is None:
            callable_ = self._unary[method] = self._channel.unary_unary(method)
        metadata = self._access.metadata() + trace_context()
        try:
            message, rest_s = b"".join(pieces), deadline.rest_s()
            # Closing closes the channel, and that ends such a call; a future costs a thread hop.
            if cancellation.only_by_close and len(message) < _BLOCKING_NBYTES:
                return callable_(message, timeout=rest_s, metadata=metadata)
            future = callable_.future(message, timeout=rest_s, metadata=metadata)
            try:
                with cancellation.calls(future.cancel):
                    return future.result(rest_s)
            finally:
                future.cancel()  # does nothing to a call that has ended
        except grpc.RpcError as error:
            # Without its frames, which keep it and the tensors until the garbage is collected.
            raise from_rpc_error(error, self._target, deadline.timeout) from error.with_traceback(None)
        except grpc.FutureTimeoutError as error:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise from_status(code, "it stands still", b"", self._target, deadline.timeout) from error
        except grpc.FutureCancelledError as error:
            raise UnavailableError(f"the call to {self._target} was cancelled") from error

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
        """Makes one exchange; see `bngrad._transports.http2.DirectEndpoint.exchange`."""
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method)
        metadata = self._access.metadata() + trace_context()
        try:
            messages = _messages(number, header, tensors)
            responses = exchange(messages, timeout=deadline.rest_s(), metadata=metadata)
            try:
                with cancellation.calls(responses.cancel):
                    message = next(responses, b"")
                    field = wire.only_field(message, len(message))
                    if field is None or field[0] != number:
                        raise InternalError(f"{self._target} did not answer an exchange with the response of its op")
                    for target in targets:
                        self._receive_into(responses, target)
                    if next(responses, None) is not None:
                        raise InternalError(f"{self._target} answered with more than was asked for")
            finally:
                responses.cancel()  # does nothing to a call that has ended
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target, deadline.timeout) from error.with_traceback(None)
        return message[field[1] :]

    def _receive_into(self, responses: Iterator[bytes], target: memoryview) -> None:
        start = 0
        while start < len(target):
            message = next(responses, None)
            if message is None:
                raise InternalError(f"{self._target} answered with {start} bytes instead of {len(target)}")
            field = wire.only_field(message, len(message))
            if field is None or field[0] != pb.ExchangeResponse.CHUNK_FIELD_NUMBER:
                raise InternalError(f"{self._target} answered with something else than the chunks of the answer")
            end = start + len(message) - field[1]
            if end > len(target):
                raise InternalError(f"{self._target} answered with {end - len(target)} bytes too many")
            chunk = np.frombuffer(message, np.uint8, end - start, field[1])
            np.copyto(np.frombuffer(target[start:end], np.uint8), chunk)
            start = end


def _messages(number: int, header: list[Buffer], tensors: list[memoryview]) -> Iterator[bytes]:
    yield b"".join([wire.field_prefix(number, sum(map(len, header))), *header])
    for tensor in tensors:
        for pieces in wire.chunks(pb.ExchangeRequest.CHUNK_FIELD_NUMBER, tensor, _CHUNK_NBYTES):
            yield b"".join(pieces)
