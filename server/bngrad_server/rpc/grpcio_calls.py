"""One call on the grpcio port: who makes it, what arrives of it, and how it is aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import NoReturn

import grpc
from grpc_status import rpc_status

from bngrad_server.errors import grpc_status
from bngrad_server.rpc_context import MessageTraffic, RpcContext
from bngrad_server.runtime.traffic_accounts import OpTraffic
from bngrad_server.security.auth import Authenticator, authenticated_client
from bngrad_server.security.certificates import client_of_context


def rpc_context(context: grpc.ServicerContext, name: str, authenticator: Authenticator) -> RpcContext:
    """Returns what the server knows of a call; ``name`` is that of its peer, for which grpcio takes 10 µs."""
    rest_s = context.time_remaining()
    endless = rest_s is None or rest_s > threading.TIMEOUT_MAX  # grpcio reports no deadline as one in centuries
    deadline = None if endless else time.monotonic() + rest_s
    metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
    if authenticator.requires_token:  # the interceptor has checked it
        client = authenticated_client.get()
    else:
        host = _host(name)
        client = client_of_context(context, host) if authenticator.requires_certificate else host
    return RpcContext(
        client, deadline, lambda: not context.is_active(), context.cancel, metadata, authenticator.check_of(context)
    )


def _host(peer: str) -> str:
    """Returns the host of a peer such as ``ipv4:127.0.0.1:50051`` or ``ipv6:%5B::1%5D:50051``."""
    family, _, address = peer.partition(":")
    return address.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D") if family != "unix" else peer


def account_of(rpc: RpcContext, authenticator: Authenticator) -> str | None:
    """Returns whose account a call's traffic counts in; None for that of its connection."""
    return rpc.client if authenticator.requires_token or authenticator.requires_certificate else None


def check_active(context: grpc.ServicerContext) -> None:
    """Raises CancelledError for a call that was cancelled, such as while it waited for a thread or was computed."""
    if not context.is_active():
        raise CancelledError


def call_at_end(context: grpc.ServicerContext, callback: Callable[[], None]) -> None:
    """Has grpcio call back when a call has ended; calls at once if it has ended already, or grpcio has no memory."""
    will_be_called = False
    try:
        will_be_called = context.add_callback(callback)
    finally:
        if not will_be_called:
            callback()


def receive(messages: Iterator[bytes], op: OpTraffic) -> bytes | None:
    """Receives a client's next message; None if there is none.

    Raises:
        CancelledError: The call was cancelled, or its deadline has passed.
    """
    try:
        message = next(messages, None)
    except grpc.RpcError as error:
        # The call's frames refer to the error, and its traceback to them: this circle would keep the stream, of which
        # a connection has a limited number, until garbage is collected.
        error.__traceback__ = None
    else:
        op.received(len(message or b""))
        return message
    raise CancelledError


def receive_required(messages: Iterator[bytes], op: OpTraffic) -> bytes | None:
    """Receives a message that the call needs; None if the client has ended its messages.

    Raises:
        CancelledError: The call was cancelled, or its deadline has passed.
    """
    message = receive(messages, op)
    # grpcio reports the end of a cancelled call's messages just before the cancellation. It keeps the order, so that
    # what is asked for now is answered after both.
    return receive(messages, op) if message is None else message


def counted(receive: Callable[[], bytes | None], traffic: MessageTraffic) -> Callable[[], bytes | None]:
    """Returns what receives as before, and adds the bytes to the traffic."""

    def receive_and_count() -> bytes | None:
        message = receive()
        traffic.moved += len(message or b"")
        return message

    return receive_and_count


def abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    """Ends a call with the status of an error."""
    _, status = grpc_status(error)
    context.abort_with_status(rpc_status.to_status(status))
