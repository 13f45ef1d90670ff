"""A server's life: listen, start the workers, serve until told to stop, drain, stop."""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from bngrad_server.config import ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.errors import TracingError
from bngrad_server.memory.leases import LeaseServer
from bngrad_server.monitor.status import engine_status
from bngrad_server.monitor.supervisor import MonitorSupervisor
from bngrad_server.rpc.health import Health
from bngrad_server.rpc.http2.port import Http2Port
from bngrad_server.rpc.other_calls import other_calls
from bngrad_server.rpc.servicer import SERVICE, Servicer
from bngrad_server.runtime import leftovers
from bngrad_server.runtime.janitor import Janitor
from bngrad_server.runtime.listening import raise_descriptor_limit
from bngrad_server.runtime.signals import on_stop_signals
from bngrad_server.security import setup
from bngrad_server.setting_types import NONE
from bngrad_server.telemetry.observer import Observer
from bngrad_wire import __version__
from bngrad_wire.addresses import format_host_port, host_and_port, ready_line, unix_path

if TYPE_CHECKING:
    from bngrad_server.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_SAME_SIGNAL_S = 0.1
"""Signals that come within this time are one: timeout(1) signals the command, and then its whole process group."""
_PRINT_S = 1.0
_CHECK_S = 1.0
"""How often the main thread looks whether the threads that serve still run."""


class Server:
    """A server, from its first listening socket to its last worker.

    Attributes:
        addresses: The addresses that it listens on, with the ports that were chosen for port 0.
        engine: Its engine.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Listens; health checks report NOT_SERVING.

        Raises:
            SettingError: The file or group of a setting cannot be used.
            ListenError: An address is taken, malformed, or may not be used.
            TracingError: Spans cannot be exported.
        """
        setup.check_group(config.shared_group)
        self._config = config
        self._started_at = time.time()
        self._stopping = False
        self._health = Health(("", SERVICE.full_name))
        self._tracing = _tracing() if config.traces else None
        observer = Observer(self._tracing)
        on_refusal = partial(observer.metrics.refused_call, grpc.StatusCode.UNAUTHENTICATED.name)
        certificates, authenticator = setup.set_up(config, on_refusal)
        self.engine = Engine(config, self._update_health, observer)
        self._servicer = Servicer(self.engine, authenticator)
        others = other_calls(self._servicer, self._health, has_reflection=config.reflection)
        self._port = Http2Port(self._servicer, others, self._health, certificates)
        self.addresses: list[str] = []
        self._lease_server: LeaseServer | None = None
        try:
            for address in config.listen:
                self.addresses.append(self._listen(address))
            self._advertise()
            self._lease_server = self._listen_for_leases()
            self._monitor = self._listen_for_http()
            self._janitor = Janitor(self._files())
        except BaseException:
            leftovers.remove([leftovers.describe(path) for path in self._files()])
            raise

    @property
    def http_address(self) -> str:
        """The address of the status pages; "none" if there are none."""
        return "none" if self._monitor is None else self._monitor.address

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where the SDK connects, by the network and on this host, each "none" if there is none."""
        given = self._servicer.info.endpoints
        if given.stream_host:
            place = format_host_port(given.stream_host, given.stream_port)
        else:
            place = "the address that it is given" if given.stream_port else "none"
        return place, given.local_directory or "none"

    def start(self) -> None:
        """Starts to accept connections, and returns when every worker is ready.

        Raises:
            WorkerStartError: A worker could not start.
        """
        if self._monitor is not None:
            self._monitor.start()
        self._port.start()
        if self._lease_server is not None:
            self._lease_server.start()
        self.engine.pool.start()

    @property
    def failed_part(self) -> str:
        """The part of the started server whose thread has ended by itself; empty if there is none."""
        alive = {
            "the port": self._port.is_alive,
            "the leases": self._lease_server is None or self._lease_server.is_alive,
        }
        return next((name for name, is_alive in alive.items() if not is_alive), "")

    def stop(self, drain_timeout_s: float) -> None:
        """Refuses new requests, waits for the running ones until the timeout, then ends the workers."""
        self._stopping = True
        self._health.close()
        self.engine.transfers.drain()
        self._port.stop(drain_timeout_s)
        if self._lease_server is not None:
            self._lease_server.close()
        if self._monitor is not None:
            self._monitor.close()
        self.engine.close()
        if self._tracing is not None:
            self._tracing.close()
        self._janitor.close()

    def status(self) -> dict[str, Any]:
        """Returns what the status pages show; times are in seconds since 1970, see `bngrad_server.monitor.status`."""
        return {
            "version": __version__,
            "time": time.time(),
            "started_at": self._started_at,
            "ready": self.engine.pool.is_ready and not self._stopping,
            "stopping": self._stopping,
            "addresses": self.addresses,
            "connections": self._port.connections,
            **engine_status(self.engine),
        }

    def _files(self) -> list[Path]:
        """Returns the sockets and directories that would remain if this process were killed."""
        sockets = [Path(path) for address in self.addresses if (path := unix_path(address)) is not None]
        directories = [self._lease_server.directory] if self._lease_server else []
        return [path for path in sockets if path.exists()] + directories

    def _listen(self, address: str) -> str:
        """Listens on an address of ``listen``; returns it, with the port that was chosen for port 0."""
        place = host_and_port(address)
        if place is None:
            self._port.listen_on_path(Path(unix_path(address) or ""), int(self._config.socket_mode, 8))
            return address
        return format_host_port(place[0], self._port.listen_on_port(*place))

    def _advertise(self) -> None:
        """Has ServerInfo tell the SDK where to connect."""
        ports = [place[1] for address in self.addresses if (place := host_and_port(address)) is not None]
        if ports and self._config.advertise_stream != NONE:
            host, port = self._config.advertised_stream or ("", ports[0])
            endpoints = self._servicer.info.endpoints
            endpoints.stream_host, endpoints.stream_port = host, port
            endpoints.is_at_given_port = self._config.advertised_stream is None

    def _listen_for_http(self) -> MonitorSupervisor | None:
        address = self._config.http
        if address is None:
            return None
        monitor = MonitorSupervisor(address, self._config.http_names or "", self.status)
        if not self._config.insecure:
            setup.warn_of_http(monitor.address)
        return monitor

    def _listen_for_leases(self) -> LeaseServer | None:
        """Listens on the sockets for clients on this host; None if no memory is to be shared."""
        if self._config.shared_bytes == 0:
            return None
        try:
            lease_server = LeaseServer(self.engine.regions, self._config.shared_group, self._servicer.authenticator)
        except OSError as error:
            logger.warning("no memory is shared with clients on this host: %s", error)
            return None
        self._port.listen_on_socket(lease_server.calls)
        self._servicer.info.endpoints.local_directory = str(lease_server.directory)
        return lease_server

    def _update_health(self) -> None:
        self._health.update(lambda: self.engine.pool.is_ready)


def _tracing() -> Tracing:
    try:
        from bngrad_server.telemetry.tracing import Tracing  # noqa: PLC0415 - only the otel extra has what it imports

        return Tracing()
    except ModuleNotFoundError as error:
        raise TracingError(f"traces need {error.name}: pip install '.[server,otel]' in a checkout of bngrad") from error
    except Exception as error:  # its errors have no class in common
        raise TracingError(f"OpenTelemetry does not take its OTEL_* variables: {error}") from error


def _print_soon(line: str) -> None:
    """Prints a line, but waits only a moment for its reader: the main thread has a server to stop.

    Raises:
        OSError: It cannot be printed.
    """
    errors: list[OSError] = []

    def write() -> None:
        try:
            os.write(sys.stdout.fileno(), line.encode(sys.stdout.encoding, "replace"))
        except OSError as error:
            errors.append(error)

    if sys.stdout is not None:
        thread = threading.Thread(target=write, name="ready-line", daemon=True)
        thread.start()
        thread.join(_PRINT_S)
    if errors:
        logger.critical("the server ends, since its standard output cannot be written: %s", errors[0].strerror)
        raise errors[0]


def _end_at_once(failed_part: str) -> NoReturn:
    """Ends the process as if it were killed, so that clients whose calls would hang call another server."""
    logger.critical("the server ends, since the thread of %s has ended", failed_part)
    logging.shutdown()
    os._exit(1)


def serve(config: ServerConfig) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then drains. A second one, or one before it is ready, ends it at once.

    So does the process, with exit code 1, if a thread has ended without which calls would hang.

    Raises:
        SettingError: The file or group of a setting cannot be used.
        ListenError: An address is taken, malformed, or may not be used.
        WorkerStartError: A worker could not start.
        TracingError: Spans cannot be exported.
        OSError: The system does not give what the server needs; likewise MemoryError, and RuntimeError for threads.
    """
    raise_descriptor_limit()
    ready, stopping, stopped_at = threading.Event(), threading.Event(), math.inf

    def on_signal(number: int) -> None:
        nonlocal stopped_at
        if not ready.is_set() or time.monotonic() > stopped_at + _SAME_SIGNAL_S:
            os._exit(128 + number)
        stopped_at = min(stopped_at, time.monotonic())
        stopping.set()

    on_stop_signals(on_signal)
    server = Server(config)
    try:
        server.start()
        gc.freeze()  # these objects stay: collections that traverse them would delay calls by 9 ms
        ready.set()
        devices = ", ".join(f"{status.name} ({status.description})" for status in server.engine.pool.status())
        _print_soon(ready_line(__version__, server.addresses, devices))
        logger.info("the SDK connects to: %s; on this host: %s; HTTP: %s", *server.endpoints, server.http_address)
        while not stopping.wait(_CHECK_S):
            if failed_part := server.failed_part:
                _end_at_once(failed_part)
        logger.info("draining")
    finally:
        # After a start that failed, requests would wait in vain for a worker.
        can_drain = ready.is_set() or server.engine.pool.is_ready
        server.stop(config.drain_timeout_s if can_drain else 0.0)
