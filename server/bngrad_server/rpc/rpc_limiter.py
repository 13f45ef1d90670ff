"""Calls that are no ops: of health, of reflection, of what the server is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc


class RpcLimiter(grpc.ServerInterceptor):
    """Has no such call wait for a thread, though their threads may have to wait for clients that do nothing.

    grpcio gives a thread to each call before its message is there, and to each that has answers to come, until it ends.
    Where more than so many may have to wait, the first one is ended of the connection that has most of them.
    """

    def __init__(self, most: int) -> None:
        """Takes calls.

        Args:
            most: How many may wait: fewer than there are threads.
        """
        self._most = most
        self._waiting: dict[str, list[grpc.ServicerContext]] = {}  # by connection, the first one first
        self._count = 0
        self._mutex = threading.Lock()

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """See `grpc.ServerInterceptor`."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if hasattr(behavior, "experimental_thread_pool"):  # it has threads of its own
            return handler
        read = _stream_of if handler.request_streaming else _only_one_of

        def answer(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with self._waits(context):
                request = read(messages, context)
            return behavior(request, context)

        def answers(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._waits(context):
                yield from behavior(read(messages, context), context)

        # On the wire such calls are the same; but their message is received when it is asked for.
        serialization = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answers, *serialization)
        return grpc.stream_unary_rpc_method_handler(answer, *serialization)

    @contextmanager
    def _waits(self, context: grpc.ServicerContext) -> Iterator[None]:
        peer, one_too_many = context.peer(), None
        with self._mutex:
            self._waiting.setdefault(peer, []).append(context)
            self._count += 1
            if self._count > self._most:
                crowded = max(self._waiting, key=lambda peer: len(self._waiting[peer]))
                one_too_many = self._waiting[crowded][0]
                self._remove(crowded, one_too_many)
        if one_too_many is not None:
            one_too_many.cancel()
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


def _only_one_of(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
    message = _next(messages, context)
    if message is None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
    return message


def _stream_of(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    while (message := _next(messages, context)) is not None:
        yield message


def _next(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
    """The next message; None where there is no further one."""
    try:
        return next(messages, None)
    except grpc.RpcError as error:
        error.__traceback__ = None  # see `bngrad_server.rpc.grpcio_port`
    return context.abort(grpc.StatusCode.CANCELLED, "the client has gone, or has not sent its message")
