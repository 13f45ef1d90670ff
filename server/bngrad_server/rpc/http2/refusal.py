"""Refuses a call on the HTTP/2 port."""

from __future__ import annotations

from bngrad_server.errors import UnauthenticatedError, grpc_status
from bngrad_wire import http2
from bngrad_wire.http2.errors import Status


def refuse(call: http2.ServerCall, error: Exception) -> None:
    """Ends a call with the status of an error.

    Raises:
        ConnectionError: The error is one, or the connection fails meanwhile.
    """
    if isinstance(error, ConnectionError):
        raise error
    if isinstance(error, UnauthenticatedError):
        call.end(Status.UNAUTHENTICATED, str(error))  # nothing else: no details for a stranger
    elif isinstance(error, http2.RpcError):  # the client has reset the call, and may make others
        call.end(error.code, error.message)
    else:
        code, status = grpc_status(error)
        call.end(code.value[0], status.message, status.SerializeToString())
