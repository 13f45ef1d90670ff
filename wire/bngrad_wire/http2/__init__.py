"""gRPC over HTTP/2 on blocking sockets, for large messages that must not be copied on their way.

grpcio copies what it sends twice and what it receives three times in Python alone. Here the payload of a DATA frame
goes from the caller's memory to the socket and from the socket into the caller's memory. Either end speaks with any
gRPC peer.

One thread uses a connection at a time, and one call runs on it at a time. Every wait honours the socket's own timeout;
`set_timeout` sets it at the least cost.
"""

from __future__ import annotations

from bngrad_wire.http2.buffered_socket import set_timeout
from bngrad_wire.http2.client import ClientCall, ClientConnection
from bngrad_wire.http2.errors import PeerGoneError, ProtocolError, RpcError
from bngrad_wire.http2.server import ServerCall, ServerConnection
from bngrad_wire.http2.tls import TlsSocket

__all__ = [
    "ClientCall",
    "ClientConnection",
    "PeerGoneError",
    "ProtocolError",
    "RpcError",
    "ServerCall",
    "ServerConnection",
    "TlsSocket",
    "set_timeout",
]
