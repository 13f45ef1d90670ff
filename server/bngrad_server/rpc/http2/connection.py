"""A connection of the HTTP/2 port, and the calls that it may have."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from bngrad_server.rpc.http2.handlers import Http2Handler
from bngrad_server.rpc.http2.limits.waste import Waste
from bngrad_server.rpc_context import RpcContext
from bngrad_server.staged_request import StagedRequest
from bngrad_wire import http2


class InlineCall:
    """A call without a thread.

    Attributes:
        call: The call.
        rpc: Its context.
        staged: Its staged request, once it has been submitted.
        is_abandoned: Whether the call has ended before its request.
    """

    __slots__ = ("call", "is_abandoned", "rpc", "staged")
    staged: StagedRequest

    def __init__(self, call: http2.ServerCall, rpc: RpcContext) -> None:
        self.call = call
        self.rpc = rpc
        self.is_abandoned = False

    def send_response(self, handler: Http2Handler) -> bool:
        """Sends the response of the computed call; returns False, and sends nothing, if its client may keep it waiting.

        Raises:
            Exception: Why the request could not be computed, or the response not be sent.
        """
        self.staged.check()
        return handler.answer(self.call, self.staged)


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call that waits for a thread to receive its message.

    Attributes:
        call: The call.
        rpc: Its context.
        until: How long it may wait.
    """

    call: http2.ServerCall
    rpc: RpcContext
    until: float


class Connection:
    """A connection: idle, or with an inline call, or lent to a thread, or with a call that waits for one.

    Attributes:
        sock: Its socket.
        fd: The socket's descriptor.
        client: The client that its first call belonged to.
        http: The HTTP/2 connection.
        handler: Handles its calls in threads.
        waste: How long it has kept the event loop busy for nothing.
        inline_call: Its running call, if it has no thread.
        waiting_call: Its call, if that waits for a thread.
        is_watched: Whether the event loop reads from it; then no thread uses it.
        is_outdated: Whether it is to be closed after the call that it has.
    """

    def __init__(self, sock: socket.socket, http: http2.ServerConnection, handler: Http2Handler, client: str) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.http = http
        self.handler = handler
        self.client = client
        self.waste = Waste(http)
        self.inline_call: InlineCall | None = None
        self.waiting_call: WaitingCall | None = None
        self.is_watched = False
        self.is_outdated = False

    @property
    def awaits_message(self) -> bool:
        """Whether the client has to send more of a call."""
        stream = self.http.stream  # another thread may end it
        return isinstance(stream, http2.ServerCall) and not stream.is_fully_received
