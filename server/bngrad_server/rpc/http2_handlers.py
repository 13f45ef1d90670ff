"""Answering calls on `bngrad_wire.http2`, in threads that may wait."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import grpc

from bngrad_server.errors import MessageTooLargeError, UnauthenticatedError, grpc_status
from bngrad_server.rpc.http2_uploads import MAX_MESSAGE_NBYTES, Upload
from bngrad_server.rpc.servicer import SERVICE, UNARY_OPS, Servicer
from bngrad_server.rpc_context import RpcContext
from bngrad_server.staged_request import StagedRequest
from bngrad_wire import http2
from bngrad_wire.http2 import frames

_UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
_UNAUTHENTICATED = 16
_PREFIX = f"/{SERVICE.full_name}/"
_EXCHANGE = f"{_PREFIX}Exchange"

UNARY = {_PREFIX + name: name for name in UNARY_OPS}
"""The unary calls that are served here: paths, and names of ops."""


class Answers:
    """Whatever a call asks, answers it and ends it.

    All methods raise ConnectionError or TimeoutError where the connection is of no more use.
    """

    def __init__(self, calls: Servicer, sock: socket.socket, client: str) -> None:
        """Answers the calls of one connection, see `bngrad_server.rpc_context.RpcContext.client`."""
        self._calls = calls
        self._sock = sock
        self._client = client

    def caller(self, call: http2.ServerCall, is_cancelled: Callable[[], bool]) -> RpcContext:
        """Who made a call: to be asked before anything is done for it.

        Raises:
            UnauthenticatedError: Nobody who may.
        """
        deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        guard = self._calls.guard
        if not guard.requires_token:
            return RpcContext(self._client, deadline, is_cancelled, lambda: hang_up(self._sock), call.metadata)
        check = partial(guard.authenticate, call.metadata.get("authorization"), self._client)
        return RpcContext(check(), deadline, is_cancelled, lambda: hang_up(self._sock), call.metadata, check)

    def flush(self, http: http2.ServerConnection) -> None:
        """Sends what the socket did not take at once, to a client that may not take for ever."""
        with self._calls.watched(self._nobody()):
            http.flush()

    def answer_begun(self, http: http2.ServerConnection) -> None:
        """Answers the call that a frame begins of which a part has arrived; or waits for the rest of another one."""
        with self._calls.watched(self._nobody(), frames.LARGEST_FRAME_SIZE):
            call = http.accept_partial()
        if call is not None:
            self.answer(call)

    def answer(self, call: http2.ServerCall) -> None:
        """Answers a call of which nothing has been read."""
        try:
            caller = self.caller(call, _is_gone(call))
            if call.path in UNARY:
                self.answer_message(call, self.message_of(call, caller), caller)
            elif call.path == _EXCHANGE:
                for pieces in self._calls.exchange(Upload(call, partial(self._calls.watched, caller)), caller):
                    call.send_message(*pieces)
                call.end()
            else:
                self._calls.observer.metrics.refused_call(_UNIMPLEMENTED.name)
                call.end(_UNIMPLEMENTED.value[0], f"{call.path} is not served here")
        except Exception as error:
            refuse(call, error)

    def message_of(self, call: http2.ServerCall, caller: RpcContext) -> bytes:
        """Receives the message of a unary call; empty where there is none.

        Raises:
            MessageTooLargeError: It is for `Exchange`.
            RpcError: It is compressed.
        """
        began = time.monotonic()
        try:
            with self._watched(call, caller):
                nbytes = call.receive_message() or 0
            if nbytes > MAX_MESSAGE_NBYTES:
                limit = f"at most {MAX_MESSAGE_NBYTES} bytes here, not {nbytes}; larger ones go by Exchange"
                raise MessageTooLargeError(f"the request must have {limit}")
            with self._watched(call, caller, nbytes):
                return call.read(nbytes)
        except Exception as error:
            self._calls.observer.failed(UNARY[call.path], "unary", caller, error, began)
            raise

    def _nobody(self) -> RpcContext:
        """Who has not made a call yet, but may be hung up on."""
        return RpcContext(self._client, None, lambda: False, lambda: hang_up(self._sock), {})

    def _watched(self, call: http2.ServerCall, caller: RpcContext, nbytes: int = 0) -> AbstractContextManager[None]:
        return nullcontext() if call.is_fully_received else self._calls.watched(caller, nbytes)

    def answer_message(self, call: http2.ServerCall, data: bytes, caller: RpcContext) -> None:
        """Answers a unary call whose message has been read, in the thread that has the connection from now on."""
        try:
            with self._calls.answer(UNARY[call.path], data, replace(caller, is_cancelled=_is_gone(call))) as pieces:
                call.send_message(*pieces, more=True)
                call.end()
        except Exception as error:
            refuse(call, error)

    def send(self, call: http2.ServerCall, staged: StagedRequest, caller: RpcContext) -> None:
        """Answers a unary call whose outputs are there, and closes them."""
        try:
            with self._calls.lent(staged, caller) as pieces:
                call.send_message(*pieces, more=True)
                call.end()
        except Exception as error:
            refuse(call, error)


def refuse(call: http2.ServerCall, error: Exception) -> None:
    """Ends a call for what went wrong with it.

    Raises:
        ConnectionError: That is what went wrong.
    """
    if isinstance(error, ConnectionError):
        raise error
    if isinstance(error, UnauthenticatedError):
        call.end(_UNAUTHENTICATED, str(error))
    elif isinstance(error, http2.RpcError):  # the client has reset the call, and may make others
        call.end(error.code, error.message)
    else:
        code, status = grpc_status(error)
        call.end(code.value[0], status.message, status.SerializeToString())


def hang_up(sock: socket.socket) -> None:
    """Ends a connection, from any thread; whoever uses it finds it broken."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _is_gone(call: http2.ServerCall) -> Callable[[], bool]:
    """Tells any thread whether the client has given up; only the call's own may look at the connection meanwhile."""
    owner = threading.get_ident()
    return lambda: call.cancelled() if threading.get_ident() == owner else call.failure is not None
