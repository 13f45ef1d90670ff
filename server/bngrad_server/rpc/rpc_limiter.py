"""Limits the calls other than ops: health, reflection, channelz, ServerInfo."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import grpc

from bngrad_server.errors import REFUSAL, UnauthenticatedError
from bngrad_server.rpc.grpcio_calls import call_at_end
from bngrad_server.security.auth import Authenticator

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0


class _Call(NamedTuple):
    context: grpc.ServicerContext
    check: Callable[[], object]


class RpcLimiter(grpc.ServerInterceptor):
    """Keeps threads and memory free for such calls, even if clients send nothing, or do not read their answers.

    grpcio gives a call a thread before its message has arrived, lets a call that streams its responses keep one until
    it ends, and holds the answer of any call until it is read. If there are more than a number of calls, the oldest one
    of the connection that has most of them is cancelled. Calls whose token is revoked end, too.
    """

    def __init__(self, max_calls: int, authenticator: Authenticator) -> None:
        """Allows ``max_calls`` calls, which must be fewer than there are threads."""
        self._max_calls = max_calls
        self._authenticator = authenticator
        self._calls: dict[str, list[_Call]] = {}  # by connection, oldest first
        self._count = 0
        self._mutex = threading.Lock()
        self._closing = threading.Event()
        if authenticator.requires_token:
            threading.Thread(target=self._run, name="revoked-tokens", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()

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
            call = self._enter(context)
            return behavior(read(messages, call), context)

        def handle_streaming(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            call = self._enter(context)
            for response in behavior(read(messages, call), context):
                _check(call)
                yield response

        # On the wire, such calls are the same; but their message is received when the handler asks for it.
        serialization = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(handle_streaming, *serialization)
        return grpc.stream_unary_rpc_method_handler(handle, *serialization)

    def _enter(self, context: grpc.ServicerContext) -> _Call:
        """Counts a call until grpcio reports its end."""
        call, peer, oldest = _Call(context, self._authenticator.check_of(context)), context.peer(), None
        with self._mutex:
            self._calls.setdefault(peer, []).append(call)
            self._count += 1
            if self._count > self._max_calls:
                crowded = max(self._calls, key=lambda peer: len(self._calls[peer]))
                oldest = self._calls[crowded][0]
                self._remove(crowded, oldest)
        if oldest is not None:
            oldest.context.cancel()
        call_at_end(context, partial(self._leave, peer, call))
        return call

    def _leave(self, peer: str, call: _Call) -> None:
        with self._mutex:
            self._remove(peer, call)

    def _remove(self, peer: str, call: _Call) -> None:
        calls = self._calls.get(peer, [])
        if call in calls:
            calls.remove(call)
            self._count -= 1
            if not calls:
                del self._calls[peer]

    def _run(self) -> None:
        while not self._closing.wait(_CHECK_INTERVAL_S):
            try:
                self._end_revoked()
            except Exception:  # the next look makes up for it
                with suppress(MemoryError):
                    logger.exception("a look for revoked tokens failed")

    def _end_revoked(self) -> None:
        """Ends the calls whose token is no longer valid."""
        self._authenticator.refresh()
        with self._mutex:
            calls = [call for calls in self._calls.values() for call in calls]
        for call in calls:
            try:
                call.check()
            except UnauthenticatedError:
                logger.info("ending a call of %s: its token is no longer valid", call.context.peer())
                call.context.cancel()


def _check(call: _Call) -> None:
    try:
        call.check()
    except UnauthenticatedError:
        call.context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


def _receive_one(messages: Iterator[Any], call: _Call) -> Any:
    message = _receive(messages, call)
    if message is None:
        call.context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
    return message


def _receive_all(messages: Iterator[Any], call: _Call) -> Iterator[Any]:
    while (message := _receive(messages, call)) is not None:
        _check(call)
        yield message


def _receive(messages: Iterator[Any], call: _Call) -> Any:
    """Receives the next message; None if there is none."""
    try:
        return next(messages, None)
    except grpc.RpcError as error:
        error.__traceback__ = None  # see `bngrad_server.rpc.grpcio_calls`
    return call.context.abort(grpc.StatusCode.CANCELLED, "the client is gone, or has not sent its message")
