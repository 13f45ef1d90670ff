"""The settings of a server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest message that protobuf can hold."""
MAX_PORT = 2**16 - 1


MAX_CALLS = 64
"""Calls of an op that grpcio's port answers at once. Each holds a thread, and each unary one a message."""
_LEAST_MESSAGE_BYTES = 2**26


def default_max_message_bytes() -> int:
    """So much that a message for each call takes a quarter of the memory."""
    return min(max(default_arena_bytes() // 2 // MAX_CALLS, _LEAST_MESSAGE_BYTES), MAX_MESSAGE_BYTES)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def default_arena_bytes() -> int:
    """Half of the memory that this process may use."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cgroup_limit = Path("/sys/fs/cgroup/memory.max")
    if cgroup_limit.exists() and (limit := cgroup_limit.read_text().strip()).isdigit():
        memory = min(memory, int(limit))
    return memory // 2


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What `bngrad_server.lifecycle.serve` needs to know.

    Raises:
        ValueError: A setting is out of range; the message names it.
    """

    listen: tuple[str, ...] = ("127.0.0.1:50051",)
    """Addresses: ``HOST:PORT`` (port 0 takes a free one) or ``unix:PATH``."""
    device: str = "auto"
    """``auto`` or ``cpu``."""
    threads: int = field(default_factory=_cores)
    """Threads of each CPU worker. Results have the same bits for any number."""
    workers: int = field(default_factory=lambda: min(2, _cores()))
    """Worker processes on a CPU. With more than one, requests go on where one dies, and small ones run side by side."""
    arena_bytes: int = field(default_factory=default_arena_bytes)
    """The memory for the tensors of all requests in flight, in bytes. More lets more requests wait staged; pages are
    taken from the system only when first used."""
    shared_bytes: int = field(default_factory=lambda: default_arena_bytes() // 2)
    """The memory that may be shared with clients on this host, in bytes; pages are taken when first used."""
    shared_group: str | None = None
    """The group of users, beside the server's own, that may share memory."""
    stream_port: int = 0
    """The TCP port of the endpoint for large tensors, on the host of each address; 0 takes a free one."""
    max_message_bytes: int = field(default_factory=default_max_message_bytes)
    """The largest message in which a client may send a request whole, in bytes. Chunks and shared memory have no such
    limit: their tensors never lie in the memory of a message."""
    max_batch_jobs: int = 64
    """The most requests that a worker gets at once. More makes small requests cheaper, and the first of them later."""
    max_batch_bytes: int = 8 * 2**20
    """A batch is closed once its staged bytes reach this. Large requests gain nothing from company."""
    max_batch_delay_s: float = 0.0
    """How long a request may wait for others to fill its batch while a worker is free, in seconds. 0 is best where
    requests are not tiny."""
    max_requests: int = 256
    """Requests in the server at once; beyond, clients are told to come again."""
    max_wait_s: float = 5.0
    """How long a request may have to wait for those before it, in seconds; where it would be longer, clients are told
    to come again."""
    transfer_timeout_s: float = 30.0
    """How long an upload or a download may take, in seconds, beside a second for each 128 KiB. It holds memory."""
    worker_timeout_s: float = 5.0
    """A worker that shows no life for so long is killed and replaced, in seconds."""
    drain_timeout_s: float = 30.0
    """How long requests in flight may take to end after SIGTERM, in seconds."""
    tls_certificate: Path | None = None
    """The server's certificate, a PEM file that is read again when it changes; with it, TCP ports speak TLS alone."""
    tls_key: Path | None = None
    """The private key of the certificate, in a PEM file, without a password."""
    tls_client_ca: Path | None = None
    """The authorities of clients, in a PEM file; with it, clients on TCP ports must show a certificate of theirs."""
    token_file: Path | None = None
    """Whose tokens are accepted, in lines as `bngrad token new` prints them; with it, every call must have one."""
    open_health: bool = False
    """Whether grpc.health.v1 answers without a token."""
    insecure: bool = False
    """Whether the network is protected otherwise, so that nothing need be said about ports without TLS or tokens."""
    reflection: bool = True
    """Whether clients may ask what there is to call."""
    socket_mode: str = "0600"
    """The permissions of the Unix sockets in listen, in octal: who may write to one may call."""
    max_client_requests: int = 0
    """Requests in the server at once of one client; beyond, it is told to come again. 0 is no limit."""
    max_client_bytes: int = 0
    """Tensors in the server at once of one client, in bytes, if it has several requests. 0 is no limit."""

    @property
    def has_cores_for_all(self) -> bool:
        """Whether the workers compute faster together than one of them alone."""
        return self.workers * self.threads <= _cores()

    def __post_init__(self) -> None:
        if not self.listen:
            raise ValueError("listen must name at least one address")
        if self.device not in {"auto", "cpu"}:
            raise ValueError(f"device must be 'auto' or 'cpu', not {self.device!r}")
        for name in ("threads", "workers", "arena_bytes", "max_batch_jobs", "max_batch_bytes", "max_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_wait_s", "transfer_timeout_s", "worker_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)}")
        for name in ("max_batch_delay_s", "drain_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if not 1 <= self.max_message_bytes <= MAX_MESSAGE_BYTES:
            raise ValueError(f"max_message_bytes must be from 1 to {MAX_MESSAGE_BYTES}, not {self.max_message_bytes}")
        if self.shared_bytes < 0:
            raise ValueError(f"shared_bytes must not be negative, not {self.shared_bytes}")
        if not 0 <= self.stream_port <= MAX_PORT:
            raise ValueError(f"stream_port must be from 0 to {MAX_PORT}, not {self.stream_port}")
