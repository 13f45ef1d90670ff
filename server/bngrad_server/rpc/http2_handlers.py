"""Handles the calls of the HTTP/2 port, in threads that may wait."""

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
from bngrad_server.rpc.servicer import EXCHANGE_PATH, UNARY_OPS, ExchangeSource, Servicer
from bngrad_server.rpc_context import RpcContext, no_check
from bngrad_server.staged_request import StagedRequest
from bngrad_wire import http2
from bngrad_wire.http2 import frames

_UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
_UNAUTHENTICATED = 16
_MAX_MESSAGE_NBYTES = 64 * 2**20
"""The largest message that is received whole."""
_CHUNK_NBYTES = 4 * 2**20 - 64
"""The largest chunk that a stock client takes, whose messages have at most 4 MiB by default."""
_SDK_CHUNK_NBYTES = 2**28
"""For our own client, which receives chunks without holding them in memory."""


class Http2Handler:
    """Handles the calls of one connection.

    All methods raise ConnectionError or TimeoutError if the connection is no longer usable.
    """

    def __init__(self, servicer: Servicer, sock: socket.socket, client: str) -> None:
        """Handles calls that belong to a client, see `RpcContext.client`."""
        self._servicer = servicer
        self._sock = sock
        self._client = client

    def context(self, call: http2.ServerCall, is_cancelled: Callable[[], bool]) -> RpcContext:
        """Authenticates a call; to be called before anything else is done for it.

        Raises:
            UnauthenticatedError: The call has no valid token.
        """
        deadline = None if call.timeout_s is None else time.monotonic() + call.timeout_s
        authenticator = self._servicer.authenticator
        check: Callable[[], object] = no_check
        client = self._client
        if authenticator.requires_token:
            check = partial(authenticator.authenticate, call.metadata.get("authorization"), client)
            client = authenticator.authenticate(call.metadata.get("authorization"), client)
        return RpcContext(client, deadline, is_cancelled, lambda: abort(self._sock), call.metadata, check)

    def receive_request(self, call: http2.ServerCall, rpc: RpcContext) -> bytes:
        """Receives the message of a unary call; empty if there is none.

        Raises:
            MessageTooLargeError: The message must go by `Exchange`.
            RpcError: It is compressed.
        """
        began = time.monotonic()
        try:
            with self._watched(call, rpc):
                nbytes = call.receive_message() or 0
            if nbytes > _MAX_MESSAGE_NBYTES:
                limit = f"at most {_MAX_MESSAGE_NBYTES} bytes here, not {nbytes}; larger ones go by Exchange"
                raise MessageTooLargeError(f"the request must have {limit}")
            with self._watched(call, rpc, nbytes):
                return call.read(nbytes)
        except Exception as error:
            self._servicer.observer.failed(UNARY_OPS[call.path], "unary", rpc, error, began)
            raise

    def flush(self, http: http2.ServerConnection) -> None:
        """Sends what the socket did not take at once; cuts off a client that does not receive it in time."""
        with self._servicer.transfers.watched(0, self._no_call()):
            http.flush()

    def finish_frame(self, http: http2.ServerConnection) -> None:
        """Waits for the rest of a frame, and handles the call if the frame begins one."""
        with self._servicer.transfers.watched(frames.LARGEST_FRAME_SIZE, self._no_call()):
            call = http.accept_partial()
        if call is not None:
            try:
                rpc = self.context(call, _is_cancelled(call))
            except UnauthenticatedError as error:
                refuse(call, error)
            else:
                self.handle(call, rpc)

    def handle(self, call: http2.ServerCall, rpc: RpcContext) -> None:
        """Receives and answers a call."""
        try:
            if call.path in UNARY_OPS:
                self.handle_unary(call, self.receive_request(call, rpc), rpc)
            elif call.path == EXCHANGE_PATH:
                is_sdk = call.metadata.get("user-agent") == "bngrad"
                chunk_nbytes = _SDK_CHUNK_NBYTES if is_sdk else _CHUNK_NBYTES
                source = ExchangeSource(call, call, chunk_nbytes, _MAX_MESSAGE_NBYTES)
                for pieces in self._servicer.exchange(source, replace(rpc, is_cancelled=_is_cancelled(call))):
                    call.send_message(*pieces)
                call.end()
            else:
                self._servicer.observer.metrics.refused_call(_UNIMPLEMENTED.name)
                call.end(_UNIMPLEMENTED.value[0], f"{call.path} is not served here")
        except Exception as error:
            refuse(call, error)

    def handle_unary(self, call: http2.ServerCall, data: bytes, rpc: RpcContext) -> None:
        """Answers a unary call whose message has been received."""
        rpc = replace(rpc, is_cancelled=_is_cancelled(call))
        try:
            with self._servicer.unary(UNARY_OPS[call.path], data, rpc) as pieces:
                call.send_message(*pieces, more=True)
                call.end()
        except Exception as error:
            refuse(call, error)

    def send_response(self, call: http2.ServerCall, staged: StagedRequest, rpc: RpcContext) -> None:
        """Sends the response of a unary call that was computed inline, and closes its staged request."""
        try:
            with self._servicer.response(staged, rpc) as pieces:
                call.send_message(*pieces, more=True)
                call.end()
        except Exception as error:
            refuse(call, error)

    def _no_call(self) -> RpcContext:
        """Returns a context by which a connection without a call can be aborted."""
        return RpcContext(self._client, None, lambda: False, lambda: abort(self._sock), {})

    def _watched(self, call: http2.ServerCall, rpc: RpcContext, nbytes: int = 0) -> AbstractContextManager[None]:
        return nullcontext() if call.is_fully_received else self._servicer.transfers.watched(nbytes, rpc)


def refuse(call: http2.ServerCall, error: Exception) -> None:
    """Ends a call with the status of an error.

    Raises:
        ConnectionError: The error is one, or the connection fails meanwhile.
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


def abort(sock: socket.socket) -> None:
    """Ends a connection from any thread; the thread that uses it sees it broken."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _is_cancelled(call: http2.ServerCall) -> Callable[[], bool]:
    """Returns what tells any thread whether a call of this thread was cancelled; only this one reads the connection."""
    owner = threading.get_ident()
    return lambda: call.cancelled() if threading.get_ident() == owner else call.failure is not None
