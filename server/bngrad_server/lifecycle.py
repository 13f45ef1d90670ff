"""A server's life: start the workers, listen, serve until told to stop, drain, end."""

from __future__ import annotations

import logging
import os
import signal
import threading
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from bngrad_protos import __version__
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc
from bngrad_server.config import MAX_MESSAGE_BYTES, ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.service import SERVICE_NAME, BatchNormGradService

logger = logging.getLogger(__name__)

_HANDLER_THREADS = 64
"""Requests handled at once. A handler mostly waits for its worker, so there are more than cores."""

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake, not a load balancer
]


class ListenError(Exception):
    """An address cannot be listened on."""


class Server:
    """A server that is starting or serving.

    Attributes:
        addresses: Where it listens, with the ports that were found free.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Listens, with health NOT_SERVING.

        Raises:
            ListenError: An address is taken, malformed or not ours.
        """
        self._config = config
        self._health = health.HealthServicer()
        self._set_health(serving=False)
        self.engine = Engine(config, on_change=self._update_health)
        self._grpc_server = grpc.server(
            futures.ThreadPoolExecutor(_HANDLER_THREADS, thread_name_prefix="handler"), options=_CHANNEL_OPTIONS
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc_server)
        pb_grpc.add_BatchNormGradServiceServicer_to_server(BatchNormGradService(self.engine), self._grpc_server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc_server
        )
        self.addresses = [self._listen(address) for address in config.listen]

    def start(self) -> None:
        """Accepts connections, and returns once every worker is ready.

        Raises:
            WorkerStartError: A worker could not start.
        """
        self._grpc_server.start()
        self.engine.pool.start()

    def stop(self, drain_timeout_s: float) -> None:
        """Refuses new requests, lets those in flight end in time, then ends the workers."""
        self._health.enter_graceful_shutdown()
        self._grpc_server.stop(drain_timeout_s).wait()
        self.engine.close()

    def _listen(self, address: str) -> str:
        try:
            port = self._grpc_server.add_insecure_port(address)
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address}: the address is taken, malformed or not ours") from error
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    def _update_health(self) -> None:
        self._set_health(serving=self.engine.pool.is_ready)

    def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in ("", SERVICE_NAME):
            self._health.set(service, status.SERVING if serving else status.NOT_SERVING)


def serve(config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once, as does one at the start.

    Raises:
        ListenError: An address is taken, malformed or not ours.
        WorkerStartError: A worker could not start.
    """
    ready, stopping = threading.Event(), threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if stopping.is_set() or not ready.is_set():
            os._exit(128 + number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)

    server = Server(config)
    try:
        server.start()
        ready.set()
        print(f"bngrad {__version__} ready on {', '.join(server.addresses)}: {_devices(server)}", flush=True)
        stopping.wait()
        logger.info("draining")
    finally:
        server.stop(config.drain_timeout_s)


def _devices(server: Server) -> str:
    return ", ".join(f"{status.name} ({status.description})" for status in server.engine.pool.status())
