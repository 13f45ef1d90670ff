"""The grpcio port: the service for every gRPC client, with health, reflection and channelz beside it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import grpc
from grpc_channelz.v1 import channelz
from grpc_reflection.v1alpha import reflection

from bngrad_server.config import MAX_CALLS, ServerConfig
from bngrad_server.errors import ListenError
from bngrad_server.rpc.grpcio_ops import FREE_THREADS, OpHandlers
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.other_calls import REFLECTED
from bngrad_server.rpc.rpc_limiter import RpcLimiter
from bngrad_server.rpc.servicer import Servicer
from bngrad_server.runtime.executors import HandlerExecutor
from bngrad_server.runtime.listening import bindable_addresses, check_path, max_connections
from bngrad_server.runtime.tcp_throttle import TcpThrottle
from bngrad_server.security.certificates import Certificates
from bngrad_server.telemetry.metrics import Metrics
from bngrad_wire.addresses import format_host_port, grpcio_address, host_and_port, unix_path

_OTHER_THREADS = 512
"""For calls other than ops: health, reflection, channelz, ServerInfo. A client that watches health occupies one."""
_MAX_PENDING_CALLS = 8192
_HANDSHAKE_TIMEOUT_MS = 10_000
_NO_COMPRESSION = 1
"""The bit of "identity"."""
_MAX_AGE_MS = 60_000
"""How long a connection lasts whose client has shown a certificate, since the certificate may be revoked."""


class GrpcioPort:
    """A `grpc.server` with everything that it serves."""

    def __init__(
        self, config: ServerConfig, servicer: Servicer, health: Health, certificates: Certificates | None
    ) -> None:
        """Listens nowhere yet; TCP addresses will have no TLS without certificates."""
        self._config = config
        self._certificates = certificates
        observer = servicer.observer
        self._throttle = TcpThrottle(config.max_message_bytes, config.max_client_bytes)
        self._thread: threading.Thread | None = None
        self._limiter = RpcLimiter(_OTHER_THREADS - FREE_THREADS, servicer.authenticator)
        self._server = grpc.server(
            HandlerExecutor(_OTHER_THREADS, "grpcio-other"),
            options=_options(config),
            interceptors=[
                *servicer.authenticator.interceptors(),
                self._limiter,
                *([] if observer.tracing is None else [observer.tracing.interceptor()]),
            ],
        )
        self._server.add_generic_rpc_handlers((health.handler(), OpHandlers(servicer, config, self._throttle)))
        if config.reflection:
            reflection.enable_server_reflection(REFLECTED, self._server)
        if config.channelz:
            channelz.add_channelz_servicer(self._server)
        self._server.add_generic_rpc_handlers((_UnknownMethodHandler(observer.metrics),))

    def listen(self, address: str) -> str:
        """Listens on ``HOST:PORT`` or ``unix:PATH``; returns the address, with the port that was chosen for port 0.

        Raises:
            ListenError: The address is taken, malformed, or may not be used.
        """
        place = host_and_port(address)
        if place is None:
            self._listen_on_path(address)
            return address
        for host, port in bindable_addresses(*place):
            bound = self._add_address(format_host_port(host, port))
        self._throttle.ports.add(bound)
        return format_host_port(place[0], bound)

    def _listen_on_path(self, address: str) -> None:
        path = Path(unix_path(address) or "")
        check_path(path)
        umask = os.umask(0o177)  # from its first moment, only this user can connect to the socket
        try:
            self._add_address(address)
        finally:
            os.umask(umask)
        path.chmod(int(self._config.socket_mode, 8))

    def _add_address(self, address: str) -> int:
        try:
            if self._certificates is None or unix_path(address) is not None:
                return int(self._server.add_insecure_port(grpcio_address(address)))
            return int(self._server.add_secure_port(address, self._certificates.credentials()))
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address}: {error}") from error

    def start(self) -> None:
        """Starts to accept connections."""
        others = set(threading.enumerate())
        self._server.start()
        new = (each for each in threading.enumerate() if each not in others)
        self._thread = next((each for each in new if "_serve" in each.name), None)
        self._throttle.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread of grpcio runs that begins all calls; it ends if it gets no memory for a message."""
        return self._thread is None or self._thread.is_alive()

    def stop(self, drain_timeout_s: float) -> threading.Event:
        """Refuses new calls; returns an event that is set once the running ones end, or at the timeout."""
        self._limiter.close()
        self._throttle.close()
        return self._server.stop(drain_timeout_s)


def _options(config: ServerConfig) -> list[tuple[str, Any]]:
    transfer_timeout_ms = int(1e3 * config.transfer_timeout_s)
    options = [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # Otherwise, a call that waits for its place may have sent megabytes of its message; one that has it may anyway.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", MAX_CALLS),  # a stream whose client does not read holds its response
        # A cancelled call would count until its thread has noticed: if all calls of a client time out at once, its
        # next ones would be refused. `OpHandlers` and `RpcLimiter` bound what calls can occupy.
        ("grpc.http.overload_protection", 0),
        # If more calls are pending, which no handler has seen yet, grpcio cancels some of them.
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        # A client that stops reading amid its response does not answer a ping.
        ("grpc.keepalive_time_ms", transfer_timeout_ms),
        ("grpc.http2.ping_timeout_ms", transfer_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Otherwise, a peer that floods PING is sent away and comes back at once, which costs others a second a call.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a load balancer
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_allowed_incoming_connections", max_connections(len(config.listen))),
        # Tensors do not get smaller; and grpcio limits a message's size before it decompresses it, not afterwards.
        ("grpc.compression_enabled_algorithms_bitset", _NO_COMPRESSION),
    ]
    if config.tls_client_ca:
        options.append(("grpc.max_connection_age_ms", _MAX_AGE_MS))
    return options


class _UnknownMethodHandler(grpc.GenericRpcHandler):
    """Counts the calls that no handler before it knows."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """See `grpc.GenericRpcHandler`."""
        self._metrics.refused_call(grpc.StatusCode.UNIMPLEMENTED.name)
