"""The service on grpcio: what every gRPC client can call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from bngrad_server.config import MAX_CALLS
from bngrad_server.errors import OverloadedError, grpc_status
from bngrad_server.rpc.servicer import SERVICE, UNARY_OPS, Servicer, chunk_of, exchange_error
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.executors import HandlerExecutor, InlineExecutor
from bngrad_server.security.auth import Authenticator, authorization_header
from bngrad_server.security.certificates import client_of_context
from bngrad_server.staged_request import copy
from bngrad_server.telemetry.metrics import Metrics

Behavior = TypeVar("Behavior", bound=Callable[..., Any])

_CHUNK_NBYTES = 2**20
"""grpcio is fastest with chunks of about this size: smaller ones cost calls, larger ones the cache."""
_MAX_WAITING = 1024
"""Calls on grpcio's port that wait for a thread: so many unary ones, and so many exchanges."""
_RETRY_S = 1.0
_GONE_S = 3.0
"""How much later than that nothing more comes from a client grpcio may tell that it has gone."""


class Service(grpc.GenericRpcHandler):
    """The service's handlers; messages pass as bytes, since generated code would copy their tensors.

    The ops have threads of their own, so that others, among them health, are answered however many ops wait. What
    waits for a thread has not been received yet, so it takes next to no memory.
    """

    def __init__(self, calls: Servicer) -> None:
        """Answers these calls."""
        self._metrics = calls.observer.metrics
        unary, stream = (HandlerExecutor(MAX_CALLS, name) for name in ("unary", "stream"))
        path = f"/{SERVICE.full_name}/"
        self._threads = {**{path + name: unary for name in UNARY_OPS}, f"{path}Exchange": stream}
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            # On the wire, such a call is a unary one; but its message is received when the handler asks for it.
            path + name: grpc.stream_unary_rpc_method_handler(_run_in(unary, _unary(calls, name)))
            for name in UNARY_OPS
        }
        self._handlers[f"{path}Exchange"] = grpc.stream_stream_rpc_method_handler(_run_in(stream, _exchange(calls)))
        self._handlers[f"{path}ServerInfo"] = grpc.unary_unary_rpc_method_handler(lambda *_: calls.server_info())
        self._refusal: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            _run_in(InlineExecutor(), _refuse)
        )

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """See `grpc.GenericRpcHandler`."""
        threads = self._threads.get(handler_call_details.method)
        if threads is not None and threads.queue_size >= _MAX_WAITING:
            self._metrics.refused_call(grpc.StatusCode.RESOURCE_EXHAUSTED.name)
            return self._refusal
        return self._handlers.get(handler_call_details.method)


class UnknownMethodHandler(grpc.GenericRpcHandler):
    """Serves nothing, and counts what comes to it: calls that no handler before it knows."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """See `grpc.GenericRpcHandler`."""
        self._metrics.refused_call(grpc.StatusCode.UNIMPLEMENTED.name)


def _run_in(threads: ThreadPoolExecutor, behavior: Behavior) -> Behavior:
    behavior.experimental_thread_pool = threads  # type: ignore[attr-defined]
    return behavior


def _refuse(requests: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
    _abort(context, OverloadedError(f"{_MAX_WAITING} calls wait for a thread", _RETRY_S))


def _unary(calls: Servicer, name: str) -> Callable[[Iterator[bytes], grpc.ServicerContext], bytes]:
    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        try:
            caller = _caller(context, calls.guard)
            request = _message(calls, name, caller, _Source(requests, context))
            with calls.answer(name, request, caller) as pieces:
                return b"".join(pieces)
        except Exception as error:
            _abort(context, error)

    return answer


def _message(calls: Servicer, name: str, caller: RpcContext, source: _Source) -> bytes:
    """Receives the message of a unary call."""
    began = time.monotonic()
    try:
        with calls.watched(caller):
            message = source.receive()
            if message is None:
                source.check_not_gone()
                raise DecodeError("the call has no request")
        return message
    except Exception as error:
        calls.observer.failed(name, "unary", caller, error, began)
        raise


def _exchange(calls: Servicer) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]:
    def answer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            for pieces in calls.exchange(_Source(requests, context), _caller(context, calls.guard)):
                yield b"".join(pieces)
        except Exception as error:
            _abort(context, error)

    return answer


class _Source:
    """The client's side of an exchange on grpcio."""

    chunk_nbytes = _CHUNK_NBYTES

    def __init__(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> None:
        self._messages = messages
        self._context = context

    def receive(self) -> bytes | None:
        try:
            return next(self._messages, None)
        except grpc.RpcError as error:  # the client has gone, or its deadline has passed
            # What the call holds keeps the error: the two would stay until garbage is collected, and so would the
            # stream, of which a connection has so many at most.
            error.__traceback__ = None
        raise CancelledError

    def receive_into(self, target: memoryview) -> None:
        start = 0
        while start < len(target):
            message = self.receive()
            if message is None:
                self.check_not_gone()
                raise exchange_error(f"{len(target) - start} bytes of chunks are missing")
            chunk = chunk_of(message)
            end = start + len(chunk)
            if end > len(target):
                raise exchange_error(f"a chunk has {end - len(target)} bytes more than its tensor")
            copy(target[start:end], chunk)
            start = end

    def check_not_gone(self) -> None:
        """Raises where nothing more came because the client has gone, or its deadline has passed."""
        gone = threading.Event()
        if not self._context.add_callback(gone.set) or gone.wait(_GONE_S):
            raise CancelledError


def _caller(context: grpc.ServicerContext, guard: Authenticator) -> RpcContext:
    """Who waits, and how long; gRPC tells "for ever" as centuries, which no lock can wait for."""
    rest_s = context.time_remaining()
    endless = rest_s is None or rest_s > threading.TIMEOUT_MAX
    deadline = None if endless else time.monotonic() + rest_s
    host = _host(context.peer())
    metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
    check = partial(
        guard.authenticate,
        authorization_header(context.invocation_metadata()) if guard.requires_token else None,
        client_of_context(context, host) if guard.requires_certificate else host,
    )
    return RpcContext(check(), deadline, lambda: not context.is_active(), lambda: _cancel(context), metadata, check)


def _cancel(context: grpc.ServicerContext) -> None:
    context.cancel()


def _host(peer: str) -> str:
    """The host of a peer such as ``ipv4:127.0.0.1:50051`` or ``ipv6:%5B::1%5D:50051``."""
    family, _, address = peer.partition(":")
    return address.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D") if family != "unix" else peer


def _abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    _, status = grpc_status(error)
    context.abort_with_status(rpc_status.to_status(status))
