"""Authenticates callers: tokens and certificates, the same on every port."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health

from bngrad_server.errors import REFUSAL, UnauthenticatedError
from bngrad_server.rpc_context import no_check
from bngrad_server.runtime.executors import InlineExecutor
from bngrad_server.security.tokens import Tokens
from bngrad_wire.http2.sockets.peers import credentials_of

_HEADER = "authorization"
_HEALTH = f"/{health.SERVICE_NAME}/"

authenticated_client: ContextVar[str] = ContextVar("authenticated_client")
"""The owner of the token of a call on grpcio; set by the interceptor for the call's handler."""


def local_client(sock: socket.socket) -> str:
    """Returns the client of a connection to a Unix socket, where no token is needed: its process."""
    pid, _, _ = credentials_of(sock)
    return f"process {pid}"


class Authenticator:
    """Decides which client a call belongs to; see `bngrad_server.rpc_context.RpcContext.client`.

    Attributes:
        requires_token: Whether calls need a token.
        requires_certificate: Whether clients on TCP ports need a certificate, which names them.
    """

    def __init__(
        self,
        tokens: Tokens | None = None,
        *,
        requires_certificate: bool = False,
        open_health: bool = False,
        on_refusal: Callable[[], object] = lambda: None,
    ) -> None:
        """Accepts calls with one of these tokens; None accepts every call, ``open_health`` every health check."""
        self._tokens = tokens
        self._on_refusal = on_refusal
        self._open_health = open_health
        self.requires_token = tokens is not None
        self.requires_certificate = requires_certificate

    def authenticate(self, authorization: str | None, default: str) -> str:
        """Returns the client that a call belongs to.

        Args:
            authorization: The call's ``authorization`` header, if it has one.
            default: The client where no token is needed.

        Raises:
            UnauthenticatedError: A token is needed, and the call has no valid one.
        """
        if self._tokens is None:
            return default
        owner = self._tokens.owner(authorization)
        if owner is None:
            self._on_refusal()
            raise UnauthenticatedError
        return f"token {owner}"

    def refresh(self) -> None:
        """See `bngrad_server.security.tokens.Tokens.refresh`."""
        if self._tokens is not None:
            self._tokens.refresh()

    def is_open(self, path: str) -> bool:
        """Whether a call of this method needs no token."""
        return not self.requires_token or (self._open_health and path.startswith(_HEALTH))

    def check_of(self, context: grpc.ServicerContext) -> Callable[[], object]:
        """Returns what raises UnauthenticatedError once the token of a call on grpcio is no longer valid.

        To be called by the call's handler.
        """
        if authenticated_client.get(None) is None:  # the call needs none
            return no_check
        return partial(self.authenticate, authorization_header(context.invocation_metadata()), "")

    def interceptors(self) -> list[grpc.ServerInterceptor]:
        """Returns the interceptors for grpcio, which also refuse calls of methods that do not exist."""
        return [] if self._tokens is None else [_Interceptor(self)]


ALLOW_ALL = Authenticator()
"""Accepts every call."""


def authorization_header(metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
    """Returns the ``authorization`` header in grpcio's metadata; None where there is none, or several."""
    values = [value for name, value in metadata if name == _HEADER]
    return str(values[0]) if len(values) == 1 else None


class _Interceptor(grpc.ServerInterceptor):
    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        # A handler of this kind answers before any message has arrived.
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        if self._authenticator.is_open(handler_call_details.method):
            return continuation(handler_call_details)
        try:
            header = authorization_header(handler_call_details.invocation_metadata)
            authenticated_client.set(self._authenticator.authenticate(header, ""))
        except UnauthenticatedError:
            return self._refusal
        return continuation(handler_call_details)


def _refuse(requests: Any, context: grpc.ServicerContext) -> Any:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


_refuse.experimental_thread_pool = InlineExecutor()  # type: ignore[attr-defined]
