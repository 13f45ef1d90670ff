"""gRPC over HTTP/2 on blocking sockets, for large messages that must not be copied.

In Python alone, grpcio copies what it sends twice and what it receives three times. Here the payload of a DATA frame
goes from the caller's memory to the socket, and from the socket into the caller's memory. Each end interoperates with
any gRPC peer.

A connection is used by one thread at a time, and runs one call at a time; a `MultiplexedConnection` of a server may run
several, each on a `Lane` that any thread may use. Every wait honours the socket's timeout; `set_timeout` sets it at the
least cost.
"""

from __future__ import annotations

from bngrad_wire.http2.client import ClientCall, ClientConnection
from bngrad_wire.http2.errors import PeerGoneError, PeerLostError, ProtocolError, RpcError
from bngrad_wire.http2.server.call import ServerCall
from bngrad_wire.http2.server.connection import ServerConnection
from bngrad_wire.http2.server.lane import Lane
from bngrad_wire.http2.server.multiplexed import MultiplexedConnection
from bngrad_wire.http2.server.outbound import KeptAnswers
from bngrad_wire.http2.server.relay import Uploads
from bngrad_wire.http2.sockets.aborting import abort
from bngrad_wire.http2.sockets.timeouts import set_timeout
from bngrad_wire.http2.sockets.tls import TlsSocket

__all__ = [
    "ClientCall",
    "ClientConnection",
    "KeptAnswers",
    "Lane",
    "MultiplexedConnection",
    "PeerGoneError",
    "PeerLostError",
    "ProtocolError",
    "RpcError",
    "ServerCall",
    "ServerConnection",
    "TlsSocket",
    "Uploads",
    "abort",
    "set_timeout",
]
