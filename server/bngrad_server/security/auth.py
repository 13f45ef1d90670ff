"""Authenticates callers by tokens and certificates."""

from __future__ import annotations

import socket
from collections.abc import Callable

from grpc_health.v1 import health

from bngrad_server.errors import UnauthenticatedError
from bngrad_server.security.tokens import Tokens
from bngrad_wire.http2.sockets.peers import credentials_of

_HEALTH = f"/{health.SERVICE_NAME}/"


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


ALLOW_ALL = Authenticator()
"""Accepts every call."""
