"""The service on grpcio: what every gRPC client can call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import NoReturn

import grpc
from grpc_status import rpc_status

from bngrad_server.calls import SERVICE, UNARY_OPS, Calls, chunk_of, exchange_error
from bngrad_server.engine import Patience, copy
from bngrad_server.errors import status_of

_CHUNK_NBYTES = 2**20
"""grpcio is fastest with chunks of about this size: smaller ones cost calls, larger ones the cache."""


def generic_handler(calls: Calls) -> grpc.GenericRpcHandler:
    """The service's handlers; messages pass as bytes, since generated code would copy their tensors."""
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_unary_rpc_method_handler(_unary(calls, name)) for name in UNARY_OPS
    }
    handlers["ServerInfo"] = grpc.unary_unary_rpc_method_handler(lambda request, context: calls.server_info())
    handlers["Exchange"] = grpc.stream_stream_rpc_method_handler(_exchange(calls))
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def _unary(calls: Calls, name: str) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            with calls.answer(name, request, _patience(context)) as pieces:
                return b"".join(pieces)
        except Exception as error:
            _abort(context, error)

    return answer


def _exchange(calls: Calls) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]:
    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            for pieces in calls.exchange(_Source(requests), _patience(context)):
                yield b"".join(pieces)
        except Exception as error:
            _abort(context, error)

    return answer


class _Source:
    """The client's side of an exchange on grpcio."""

    chunk_nbytes = _CHUNK_NBYTES

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages

    def receive(self) -> bytes | None:
        try:
            return next(self._messages, None)
        except grpc.RpcError as error:  # the client has gone, or its deadline has passed
            raise CancelledError from error

    def receive_into(self, target: memoryview) -> None:
        start = 0
        while start < len(target):
            message = self.receive()
            if message is None:
                raise exchange_error(f"{len(target) - start} bytes of chunks are missing")
            chunk = chunk_of(message)
            end = start + len(chunk)
            if end > len(target):
                raise exchange_error(f"a chunk has {end - len(target)} bytes more than its tensor")
            copy(target[start:end], chunk)
            start = end


def _patience(context: grpc.ServicerContext) -> Patience:
    """How long the client waits; gRPC tells "for ever" as centuries, which no lock can wait for."""
    rest_s = context.time_remaining()
    endless = rest_s is None or rest_s > threading.TIMEOUT_MAX
    return Patience(None if endless else time.monotonic() + rest_s, lambda: not context.is_active())


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    _, status = status_of(error)
    context.abort_with_status(rpc_status.to_status(status))
