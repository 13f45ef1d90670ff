"""The contestants by name, with the server that each needs and how it connects."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.transport import Prepare, arrow_flight, certificates, echo, protobuf, sdk, servers, sockets
from benchmarks.transport import kernel as in_process
from benchmarks.transport.kernel import Kernel
from benchmarks.warm_server import WarmServer

TCP, UNIX = "tcp", "unix"
NETWORKS = {TCP: "TCP loopback", UNIX: "Unix socket"}
KERNEL, EMPTY = "kernel", "grpc-empty"
_BNGRAD, _BNGRAD_TLS, _FLIGHT_TLS = "bngrad", "bngrad-tls", "flight-tls"
TLS = "bngrad-stream-tls", "bngrad-unary-tls", "flight-tls"
"""Those that encrypt, over TCP."""
TRITON = "triton", "triton-shared"
"""Those that ``make bench-triton`` installs, over TCP."""


@dataclass(frozen=True)
class Contestant:
    """One line of the plot.

    Attributes:
        title: Its name.
        server: The kind of server that it needs; empty if none.
        connect: Connects to that.
    """

    title: str
    server: str
    connect: Callable[..., AbstractContextManager[Prepare]]


_OPTIONS = {
    _BNGRAD: (),
    _BNGRAD_TLS: ("--tls-certificate", str(certificates.CERTIFICATE), "--tls-key", str(certificates.KEY)),
}


def _bngrad(title: str, **arguments: Any) -> Contestant:
    return Contestant(f"bngrad, {title}", _BNGRAD, partial(sdk.connect, **arguments))


def _triton(title: str, function: str) -> Contestant:
    """Imports Triton's client when it connects, since only ``make bench-triton`` installs that."""

    def connect(target: str) -> AbstractContextManager[Prepare]:
        client = importlib.import_module("benchmarks.transport.triton.client")
        connected: AbstractContextManager[Prepare] = getattr(client, function)(target)
        return connected

    return Contestant(f"Triton, {title}", "triton", connect)


CONTESTANTS: Mapping[str, Contestant] = {
    "bngrad": _bngrad("plain client"),
    "bngrad-auto": _bngrad("auto", transport="auto"),
    "bngrad-shared": _bngrad("shared memory, arrays in the region", transport="shared", in_region=True),
    "bngrad-shared-copy": _bngrad("shared memory, ordinary arrays", transport="shared"),
    "bngrad-stream": _bngrad("stream", transport="stream"),
    "bngrad-unary": _bngrad("unary", transport="unary"),
    "protobuf": Contestant("plain protobuf service", "protobuf", protobuf.connect),
    "grpc-echo": Contestant("bare gRPC echo, no compute", "echo", echo.connect),
    EMPTY: Contestant("empty gRPC call", "echo", partial(echo.connect, empty=True)),
    "flight": Contestant("Arrow Flight", "flight", arrow_flight.connect),
    "flight-echo": Contestant("Arrow Flight, no compute", "flight", partial(arrow_flight.connect, compute=False)),
    "triton": _triton("gRPC", "connect"),
    "triton-shared": _triton("system shared memory", "connect_shared"),
    "sockets": Contestant("bare sockets, no compute", "sockets", sockets.connect),
    "bngrad-stream-tls": Contestant(
        "bngrad, stream, TLS", _BNGRAD_TLS, partial(sdk.connect, transport="stream", encrypted=True)
    ),
    "bngrad-unary-tls": Contestant(
        "bngrad, unary, TLS", _BNGRAD_TLS, partial(sdk.connect, transport="unary", encrypted=True)
    ),
    "flight-tls": Contestant("Arrow Flight, TLS", _FLIGHT_TLS, partial(arrow_flight.connect, encrypted=True)),
    KERNEL: Contestant("kernel in process", "", in_process.connect),
}


@contextlib.contextmanager
def connected(names: list[str], network: str, kernel: Kernel, folder: Path) -> Iterator[dict[str, Prepare]]:
    """Starts the servers that contestants need, each in a process of its own, and connects the contestants.

    Those that know TCP only are left out of other networks.
    """
    names = [name for name in names if network == TCP or name not in (*TLS, *TRITON)]
    if set(TLS) & set(names):
        certificates.make()
    with contextlib.ExitStack() as stack:
        targets: dict[str, Any] = {"": kernel}
        for kind in dict.fromkeys(CONTESTANTS[name].server for name in names):
            if kind:
                address = f"unix:{folder / kind}.sock" if network == UNIX else "127.0.0.1:0"
                targets[kind] = stack.enter_context(_server(kind, address, kernel))
        yield {
            name: stack.enter_context(CONTESTANTS[name].connect(targets[CONTESTANTS[name].server])) for name in names
        }


@contextlib.contextmanager
def _server(kind: str, address: str, kernel: Kernel) -> Iterator[str]:
    if kind in _OPTIONS:
        whole_requests = "--max-message-bytes", "1GiB"
        options = "--threads", str(kernel.threads), *whole_requests, *_OPTIONS[kind]
        with WarmServer(address, device=kernel.device, options=options) as server:
            yield server.target
    else:
        with servers.running(kind, address, kernel.threads, kernel.device) as target:
            yield target
