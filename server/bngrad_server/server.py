"""A server's life: start the workers, listen, serve until told to stop, drain, end."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from bngrad_server.config import MAX_CALLS, ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.errors import ListenError, TracingError
from bngrad_server.memory.leases import LeaseServer
from bngrad_server.monitor.status import engine_status
from bngrad_server.monitor.supervisor import MonitorSupervisor
from bngrad_server.rpc.grpcio_port import Service, UnknownMethodHandler
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.http2_port import Http2Port
from bngrad_server.rpc.rpc_limiter import RpcLimiter
from bngrad_server.rpc.servicer import SERVICE, Servicer
from bngrad_server.runtime.executors import HandlerExecutor
from bngrad_server.runtime.janitor import Janitor
from bngrad_server.runtime.listening import check_address, max_connections, raise_descriptor_limit, socket_path
from bngrad_server.runtime.malloc import use_one_heap
from bngrad_server.runtime.signals import on_stop_signals
from bngrad_server.security import setup
from bngrad_server.telemetry.observer import Observer
from bngrad_wire import __version__

if TYPE_CHECKING:
    from bngrad_server.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_OTHER_THREADS = 512
"""For what is no op: health, reflection, what the server is. Who watches health has one for as long as that."""
_FREE_THREADS = 16
"""How many of them never wait for a client."""
_MAX_UNSEEN_CALLS = 8192
_HANDSHAKE_TIMEOUT_MS = 10_000
_NO_COMPRESSION = 1
"""The bit of "identity"."""
_MAX_AGE_MS = 60_000
"""How long a connection on grpcio's port lasts whose client has shown a certificate, which may be revoked meanwhile."""


class Server:
    """A server that is starting or serving.

    Attributes:
        addresses: Where it listens, with the ports that were found free.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Listens, with health NOT_SERVING.

        Raises:
            ListenError: An address is taken, malformed or not ours.
            TracingError: Spans cannot be exported.
        """
        self._config = config
        self._started_at = time.time()
        self._stopping = False
        self._health = Health(("", SERVICE.full_name))
        self._health_mutex = threading.Lock()
        self._tracing = _tracing() if config.traces else None
        observer = Observer(self._tracing)
        self._certificates, guard = setup.set_up(config, observer.metrics)
        self.engine = Engine(config, self._update_health, observer)
        self._grpc_server = grpc.server(
            HandlerExecutor(_OTHER_THREADS, "handler"),
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                ("grpc.max_concurrent_streams", MAX_CALLS),  # a stream whose client does not read holds its answer
                # A cancelled call would count until its thread has noticed: where all of a client's time out at once,
                # its next ones would be refused. What they can take is bounded by `service` itself.
                ("grpc.http.overload_protection", 0),
                # Of the calls that have come and were not looked at yet, some are cancelled where there are more.
                ("grpc.server.max_pending_requests", _MAX_UNSEEN_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", _MAX_UNSEEN_CALLS),
                # A client that stands still, with its answer half read, does not answer a ping.
                ("grpc.keepalive_time_ms", int(1e3 * config.transfer_timeout_s)),
                ("grpc.http2.ping_timeout_ms", int(1e3 * config.transfer_timeout_s)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a load balancer
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
                ("grpc.max_allowed_incoming_connections", max_connections(len(config.listen))),
                # Tensors do not get smaller; and a message's size is limited before it is unpacked, not afterwards.
                ("grpc.compression_enabled_algorithms_bitset", _NO_COMPRESSION),
                *([("grpc.max_connection_age_ms", _MAX_AGE_MS)] if config.tls_client_ca else []),
            ],
            interceptors=[
                *guard.interceptors(open_health=config.open_health),
                RpcLimiter(_OTHER_THREADS - _FREE_THREADS),
                *([] if self._tracing is None else [self._tracing.interceptor()]),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc_server)
        self._calls = Servicer(self.engine, config.max_message_bytes, guard)
        self._grpc_server.add_generic_rpc_handlers((Service(self._calls),))
        if config.reflection:
            reflection.enable_server_reflection(
                (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc_server
            )
        if config.channelz:
            channelz.add_channelz_servicer(self._grpc_server)
        self._grpc_server.add_generic_rpc_handlers((UnknownMethodHandler(observer.metrics),))
        self.addresses = [self._listen(address) for address in config.listen]
        self._endpoint = Http2Port(self._calls, self._certificates)
        self._calls.endpoints.stream_port = self._listen_for_streams()
        self._local = self._listen_locally()
        self._monitor = self._listen_for_http()
        self._janitor = Janitor(self._left_behind())

    @property
    def http_address(self) -> str:
        """Where HTTP is served; "none" for nowhere."""
        return "none" if self._monitor is None else self._monitor.address

    @property
    def endpoints(self) -> tuple[str, str]:
        """The port for large tensors and the directory for clients on this host, or "none"."""
        given = self._calls.endpoints
        return f"port {given.stream_port}" if given.stream_port else "none", given.local_directory or "none"

    def start(self) -> None:
        """Accepts connections, and returns once every worker is ready.

        Raises:
            WorkerStartError: A worker could not start.
        """
        if self._monitor is not None:
            self._monitor.start()
        self._grpc_server.start()
        self._endpoint.start()
        if self._local is not None:
            self._local.start()
        self.engine.pool.start()

    def stop(self, drain_timeout_s: float) -> None:
        """Refuses new requests, lets those in flight end in time, then ends the workers."""
        self._stopping = True
        self._health.close()
        stopped = self._grpc_server.stop(drain_timeout_s)
        self._endpoint.stop(drain_timeout_s)
        stopped.wait()
        if self._local is not None:
            self._local.close()
        if self._monitor is not None:
            self._monitor.close()
        self.engine.close()
        if self._tracing is not None:
            self._tracing.close()
        self._janitor.close()

    def status(self) -> dict[str, Any]:
        """What is shown over HTTP; times are in seconds since 1970, see also `bngrad_server.monitor.status`."""
        return {
            "version": __version__,
            "time": time.time(),
            "started_at": self._started_at,
            "ready": self.engine.pool.is_ready and not self._stopping,
            "stopping": self._stopping,
            "addresses": self.addresses,
            "connections": self._endpoint.connections,
            **engine_status(self.engine),
        }

    def _left_behind(self) -> list[Path]:
        """What stays in the file system if this process is killed."""
        sockets = [path for address in self.addresses if (path := socket_path(address)) is not None]
        return [path for path in sockets if path.exists()] + ([self._local.directory] if self._local else [])

    def _listen(self, address: str) -> str:
        check_address(address)
        path = socket_path(address)
        umask = os.umask(0o177) if path else None  # from its first moment the socket is for nobody else
        try:
            if path or self._certificates is None:
                port = self._grpc_server.add_insecure_port(address)
            else:
                port = self._grpc_server.add_secure_port(address, self._certificates.credentials())
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address}") from error
        finally:
            if umask is not None:
                os.umask(umask)
        if path is None:
            return f"{address.rpartition(':')[0]}:{port}"
        path.chmod(int(self._config.socket_mode, 8))
        return address

    def _listen_for_streams(self) -> int:
        """The port of the endpoint for large tensors; 0 where the server listens on no TCP address."""
        hosts = [
            address.rpartition(":")[0].strip("[]") for address in self.addresses if not address.startswith("unix:")
        ]
        if not hosts:
            return 0
        port = self._config.stream_port
        try:
            return self._endpoint.listen_on_port(hosts[0], port)
        except OSError as error:
            raise ListenError(f"cannot listen on port {port} of {hosts[0]} for streams: {error.strerror}") from error

    def _listen_for_http(self) -> MonitorSupervisor | None:
        address = self._config.http
        if address is None:
            return None
        try:
            return MonitorSupervisor(address, self.status)
        except OSError as error:
            raise ListenError(f"cannot listen on {address} for HTTP: {error.strerror}") from error

    def _listen_locally(self) -> LeaseServer | None:
        """The sockets for clients on this host; None where nothing is to be shared."""
        if self._config.shared_bytes == 0:
            return None
        try:
            sockets = LeaseServer(self.engine.regions, self._config.shared_group, self._calls.guard)
        except LookupError as error:
            raise ListenError(f"cannot share memory with clients on this host: {error}") from error
        except OSError as error:
            logger.warning("no memory is shared with clients on this host: %s", error)
            return None
        self._endpoint.listen_on_socket(sockets.calls)
        self._calls.endpoints.local_directory = str(sockets.directory)
        return sockets

    def _update_health(self) -> None:
        with self._health_mutex:  # or one keeper would say what was so before another one's worker was ready, or died
            self._health.set(serving=self.engine.pool.is_ready)


def _tracing() -> Tracing:
    try:
        from bngrad_server.telemetry.tracing import Tracing  # noqa: PLC0415 - only the otel extra has what it imports
    except ModuleNotFoundError as error:
        raise TracingError(f"traces need {error.name}: pip install 'bngrad[server,otel]'") from error
    return Tracing()


def serve(config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once, as does one at the start.

    Raises:
        ListenError: An address is taken, malformed or not ours.
        WorkerStartError: A worker could not start.
        TracingError: Spans cannot be exported.
    """
    use_one_heap()
    raise_descriptor_limit()
    ready, stopping = threading.Event(), threading.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set() or not ready.is_set():
            os._exit(128 + number)
        stopping.set()

    on_stop_signals(on_signal)
    server = Server(config)
    try:
        server.start()
        gc.freeze()  # what is there now stays, and need not be looked at again: that would hold up a call by 9 ms
        ready.set()
        print(f"bngrad {__version__} ready on {', '.join(server.addresses)}: {_devices(server)}", flush=True)
        logger.info("large tensors: %s; clients on this host: %s; HTTP: %s", *server.endpoints, server.http_address)
        stopping.wait()
        logger.info("draining")
    finally:
        server.stop(config.drain_timeout_s)


def _devices(server: Server) -> str:
    return ", ".join(f"{status.name} ({status.description})" for status in server.engine.pool.status())
