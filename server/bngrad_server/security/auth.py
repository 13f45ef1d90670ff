"""Asks whoever calls for a token, where there are any, the same way at every door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health

from bngrad_server.errors import REFUSAL, UnauthenticatedError
from bngrad_server.runtime.executors import InlineExecutor
from bngrad_server.security.tokens import Tokens

_HEADER = "authorization"
_HEALTH = f"/{health.SERVICE_NAME}/"


class Authenticator:
    """Who may call, and as whom: see `bngrad_server.rpc_context.RpcContext.client`.

    Attributes:
        requires_token: Whether calls need one.
        requires_certificate: Whether clients have some, which say who they are.
    """

    def __init__(
        self,
        tokens: Tokens | None = None,
        *,
        requires_certificate: bool = False,
        on_refusal: Callable[[], object] = lambda: None,
    ) -> None:
        """Lets only owners of these tokens in; None lets everybody in."""
        self._tokens = tokens
        self._on_refusal = on_refusal
        self.requires_token = tokens is not None
        self.requires_certificate = requires_certificate

    def authenticate(self, authorization: str | None, otherwise: str) -> str:
        """Whom a call belongs to.

        Args:
            authorization: The value of its header, if it has one.
            otherwise: Whom it belongs to where no token says.

        Raises:
            UnauthenticatedError: It has no token that is known.
        """
        if self._tokens is None:
            return otherwise
        owner = self._tokens.owner(authorization)
        if owner is None:
            self._on_refusal()
            raise UnauthenticatedError
        return f"token {owner}"

    def interceptors(self, *, open_health: bool) -> list[grpc.ServerInterceptor]:
        """What stands before every method on grpcio, also before those that do not exist."""
        return [] if self._tokens is None else [_Interceptor(self, open_health)]


ALLOW_ALL = Authenticator()
"""Lets everybody in."""


def authorization_header(metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
    """The value of the header in the metadata of grpcio; None where there is none, or several."""
    values = [value for name, value in metadata if name == _HEADER]
    return str(values[0]) if len(values) == 1 else None


class _Interceptor(grpc.ServerInterceptor):
    def __init__(self, guard: Authenticator, open_health: bool) -> None:
        self._guard = guard
        self._open_health = open_health
        # Of this kind, since it is answered before any message has arrived.
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        if self._open_health and handler_call_details.method.startswith(_HEALTH):
            return continuation(handler_call_details)
        try:
            self._guard.authenticate(authorization_header(handler_call_details.invocation_metadata), "")
        except UnauthenticatedError:
            return self._refusal
        return continuation(handler_call_details)


def _refuse(requests: Any, context: grpc.ServicerContext) -> Any:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


_refuse.experimental_thread_pool = InlineExecutor()  # type: ignore[attr-defined]
