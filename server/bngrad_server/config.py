"""The settings of a server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest message that protobuf can hold."""
MAX_PORT = 2**16 - 1


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
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Threads of a CPU worker. Results have the same bits for any number."""
    arena_bytes: int = field(default_factory=default_arena_bytes)
    """The memory for the tensors of all requests in flight, in bytes. More lets more requests wait staged; pages are
    taken from the system only when first used."""
    shared_bytes: int = field(default_factory=lambda: default_arena_bytes() // 2)
    """The memory that may be shared with clients on this host, in bytes; pages are taken when first used."""
    shared_group: str | None = None
    """The group of users, beside the server's own, that may share memory."""
    stream_port: int = 0
    """The TCP port of the endpoint for large tensors, on the host of each address; 0 takes a free one."""
    max_batch_jobs: int = 64
    """The most requests that a worker gets at once. More makes small requests cheaper, and the first of them later."""
    max_batch_bytes: int = 8 * 2**20
    """A batch is closed once its staged bytes reach this. Large requests gain nothing from company."""
    drain_timeout_s: float = 30.0
    """How long requests in flight may take to end after SIGTERM, in seconds."""

    def __post_init__(self) -> None:
        if not self.listen:
            raise ValueError("listen must name at least one address")
        if self.device not in {"auto", "cpu"}:
            raise ValueError(f"device must be 'auto' or 'cpu', not {self.device!r}")
        for name in ("threads", "arena_bytes", "max_batch_jobs", "max_batch_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.shared_bytes < 0:
            raise ValueError(f"shared_bytes must not be negative, not {self.shared_bytes}")
        if not 0 <= self.stream_port <= MAX_PORT:
            raise ValueError(f"stream_port must be from 0 to {MAX_PORT}, not {self.stream_port}")
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"drain_timeout_s must not be negative, not {self.drain_timeout_s}")
