"""Calls by grpcio: slower than our own HTTP/2, but possible wherever gRPC is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpc

from bngrad._credentials import Credentials
from bngrad._deadline import Cancellation, Deadline, held_back
from bngrad._errors import InternalError, UnavailableError, from_rpc_error, from_status
from bngrad._transports.server_state import Answer, ServerState
from bngrad._transports.tracing import trace_context
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire import chunks, messages
from bngrad_wire.fields import Buffer
from bngrad_wire.load_report import TEXT_HEADER

_BLOCKING_NBYTES = 64 * 1024
"""Larger messages may block grpcio's blocking call beyond its deadline, until the socket has taken them."""
_CHUNK_NBYTES = 2**20
"""grpcio is fastest with chunks of about this size: smaller ones cost calls, larger ones cache misses."""


class GrpcioTransport:
    """A gRPC channel, with the methods of `bngrad._transports.http2.Http2Transport`."""

    unary_below_nbytes = 2**20
    """Tensors of at least this size are better exchanged in chunks."""

    def __init__(self, channel: grpc.Channel, target: str, credentials: Credentials, server: ServerState) -> None:
        self._server = server
        self._channel = channel
        self._target = target
        self._credentials = credentials
        self._unary: dict[str, grpc.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    def unary(self, method: str, pieces: list[Buffer], deadline: Deadline, cancellation: Cancellation) -> bytes:
        """Sends one message, and returns the response.

        Raises:
            BngradError: The status, as an error.
        """
        callable_ = self._unary.get(method)
        if callable_ is None:
            callable_ = self._unary[method] = self._channel.unary_unary(method)
        metadata = self._credentials.metadata() + trace_context()
        try:
            message, remaining_s = b"".join(pieces), deadline.remaining_s()
            # Closing the channel ends such a call; a future costs a thread hop.
            if cancellation.only_by_close and len(message) < _BLOCKING_NBYTES:
                response, call = callable_.with_call(message, timeout=remaining_s, metadata=metadata)
                return self._noted(response, call)
            # The channel could not be closed without the thread that this starts.
            future = held_back(lambda: callable_.future(message, timeout=remaining_s, metadata=metadata))
            try:
                with cancellation.calls(future.cancel):
                    response = future.result(remaining_s)
                return self._noted(response, future)
            finally:
                future.cancel()  # does nothing to a call that has ended
        except grpc.RpcError as error:
            # Without its frames, which refer to it: the cycle would keep the tensors.
            raise from_rpc_error(error, self._target, deadline.timeout) from error.with_traceback(None)
        except grpc.FutureTimeoutError as error:
            code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "no data came"
            raise from_status(code, reason, b"", self._target, deadline.timeout) from error
        except grpc.FutureCancelledError as error:
            raise UnavailableError(f"the call to {self._target} was cancelled") from error

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
        """See `bngrad._transports.http2.Http2Transport.exchange`."""
        exchange: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method)
        metadata = self._credentials.metadata() + trace_context()
        try:
            requests = _requests(number, header, tensors)
            # As in unary.
            responses = held_back(lambda: exchange(requests, timeout=deadline.remaining_s(), metadata=metadata))
            try:
                with cancellation.calls(responses.cancel):
                    message = next(responses, b"")
                    field = messages.only_field(message, len(message))
                    if field is None or field[0] != number:
                        raise InternalError(f"{self._target} did not send the response of the op")
                    source = chunks.WholeMessages(lambda: next(responses, None))
                    for target in targets:
                        chunks.receive(source, chunks.RESPONSE_CHUNK, target)
                    if next(responses, None) is not None:
                        raise InternalError(f"{self._target} sent more messages than the response has")
                self._note(responses)
            finally:
                responses.cancel()  # does nothing to a call that has ended
        except chunks.ChunkError as error:
            raise InternalError(f"{self._target} sent a malformed response: {error}") from error
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target, deadline.timeout) from error.with_traceback(None)
        return message[field[1] :]

    def _noted(self, response: bytes | None, call: grpc.Call) -> bytes:
        """Returns a response, which grpcio gives as None if the call ended as OK without any."""
        self._note(call)
        if response is None:
            raise InternalError(f"{self._target} answered with nothing")
        return response

    def _note(self, call: grpc.Call) -> None:
        trailers = call.trailing_metadata() or ()
        self._server.hear(next((value for name, value in trailers if name == TEXT_HEADER), None))


def begin_to_ask(channel: grpc.Channel, method: str, credentials: Credentials, timeout_s: float) -> Answer:
    """Begins a call with an empty message.

    Raises:
        InvalidArgumentError: The token cannot be read.
        ValueError: The channel was closed.
    """
    ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    metadata = credentials.metadata()
    return held_back(lambda: ask.future(b"", timeout=timeout_s, metadata=metadata))  # as in unary


def _requests(number: int, header: list[Buffer], tensors: Sequence[Buffer]) -> Iterator[bytes]:
    yield b"".join([messages.field_prefix(number, sum(map(len, header))), *header])
    for tensor in tensors:
        for pieces in chunks.split(pb.ExchangeRequest.CHUNK_FIELD_NUMBER, tensor, _CHUNK_NBYTES):
            yield b"".join(pieces)
