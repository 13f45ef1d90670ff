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


class Caller:
    """Makes one call at a time: idle, or with an inline call, or lent to a thread, or with a call that waits for one.

    Attributes:
        carrier: What its calls come by.
        handler: Handles its calls in threads.
        client: The client that it belongs to.
        inline_call: Its running call, if it has no thread.
        waiting_call: Its call, if that waits for a thread.
    """

    def __init__(self, carrier: http2.ServerConnection | http2.Lane, handler: Http2Handler, client: str) -> None:
        self.carrier = carrier
        self.handler = handler
        self.client = client
        self.inline_call: InlineCall | None = None
        self.waiting_call: WaitingCall | None = None

    @property
    def awaits_message(self) -> bool:
        """Whether the client has to send more of a call."""
        stream = self.carrier.stream  # another thread may end it
        return isinstance(stream, http2.ServerCall) and not stream.is_fully_received


class Connection(Caller):
    """A connection, which makes one call at a time, or several, each on a lane.

    Attributes:
        sock: Its socket.
        fd: The socket's descriptor.
        http: The HTTP/2 connection.
        waste: How long it has kept the event loop busy for nothing.
        lanes: Its calls by the numbers of their streams, if it may make several.
        is_watched: Whether the event loop reads from it; then no thread uses it.
        is_end_watched: Whether the event loop only waits for its end, as it is paused.
        interest: Whether it is watched for input, and for room for output, if it may make several calls.
        is_outdated: Whether it is to be closed after the calls that it has.
    """

    def __init__(
        self, sock: socket.socket, http: http2.MultiplexedConnection, handler: Http2Handler, client: str
    ) -> None:
        """``client`` is the one that its first call belonged to."""
        super().__init__(http, handler, client)
        self.sock = sock
        self.fd = sock.fileno()
        self.http = http
        self.waste = Waste(http)
        self.lanes: dict[int, Lane] = {}
        self.is_watched = self.is_end_watched = False
        self.interest = True, False
        self.is_outdated = False


class Lane(Caller):
    """One of the calls of a connection.

    Attributes:
        connection: The connection.
        lane: What carries the call.
        stream_id: The number of its stream.
        rpc: Its context, if it was checked before it had the lane.
    """

    def __init__(
        self,
        connection: Connection,
        lane: http2.Lane,
        stream_id: int,
        handler: Http2Handler,
        rpc: RpcContext | None = None,
    ) -> None:
        super().__init__(lane, handler, connection.client)
        self.connection = connection
        self.lane = lane
        self.stream_id = stream_id
        self.rpc = rpc


def connection_of(caller: Caller) -> Connection:
    """Returns the connection by which a caller makes its calls."""
    assert isinstance(caller, Connection | Lane)
    return caller if isinstance(caller, Connection) else caller.connection
