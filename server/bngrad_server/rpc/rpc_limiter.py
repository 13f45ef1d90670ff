"""Limits the calls other than ops: health, reflection, channelz, ServerInfo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc


class RpcLimiter(grpc.ServerInterceptor):
    """Keeps threads free for such calls, even if clients occupy threads and do nothing.

    grpcio gives a call a thread before its message has arrived, and lets a call that streams its responses keep one
    until it ends. If more than a number of calls may wait for their clients, the oldest call of the connection that has
    most of them is cancelled.
    """

    def __init__(self, max_waiting: int) -> None:
        """Lets ``max_waiting`` calls wait for their clients, which must be fewer than there are threads."""
        self._max_waiting = max_waiting
        self._waiting: dict[str, list[grpc.ServicerContext]] = {}  # by connection, oldest first
        self._count = 0
        self._mutex = threading.Lock()

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """See `grpc.ServerInterceptor`."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if hasattr(behavior, "experimental_thread_pool"):  # an op, which has threads of its own
            return handler
        read = _receive_all if handler.request_streaming else _receive_one

        def handle(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with self._waits(context):
                request = read(messages, context)
            return behavior(request, context)

        def handle_streaming(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._waits(context):
                yield from behavior(read(messages, context), context)

        # On the wire, such calls are the same; but their message is received when the handler asks for it.
        serialization = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(handle_streaming, *serialization)
        return grpc.stream_unary_rpc_method_handler(handle, *serialization)

    @contextmanager
    def _waits(self, context: grpc.ServicerContext) -> Iterator[None]:
        peer, oldest = context.peer(), None
        with self._mutex:
            self._waiting.setdefault(peer, []).append(context)
            self._count += 1
            if self._count > self._max_waiting:
                crowded = max(self._waiting, key=lambda peer: len(self._waiting[peer]))
                oldest = self._waiting[crowded][0]
                self._remove(crowded, oldest)
        if oldest is not None:
            oldest.cancel()
        try:
            yield
        finally:
            with self._mutex:
                self._remove(peer, context)

    def _remove(self, peer: str, context: grpc.ServicerContext) -> None:
        calls = self._waiting.get(peer, [])
        if context in calls:
            calls.remove(context)
            self._count -= 1
            if not calls:
                del self._waiting[peer]


def _receive_one(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
    message = _receive(messages, context)
    if message is None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
    return message


def _receive_all(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    while (message := _receive(messages, context)) is not None:
        yield message


def _receive(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
    """Receives the next message; None if there is none."""
    try:
        return next(messages, None)
    except grpc.RpcError as error:
        error.__traceback__ = None  # see `bngrad_server.rpc.grpcio_port`
    return context.abort(grpc.StatusCode.CANCELLED, "the client is gone, or has not sent its message")
