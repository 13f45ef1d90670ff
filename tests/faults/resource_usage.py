"""The resources of a server: memory, descriptors, threads, processes, shared memory."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.faults.server import RestartableServer
from tests.servers import descriptors_of, wait_until

MIB = 2**20
_RETURN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ProcessUsage:
    """One process: bytes of private anonymous memory, and numbers of descriptors, threads and anonymous files."""

    memory: int
    descriptors: int
    threads: int
    memfds: int


@dataclass(frozen=True)
class Usage:
    """The resources of a server without clients.

    Attributes:
        workers: The maximum of each over its workers.
        shared: Bytes of shared memory that its front process has touched, mostly the arena's.
        files: The files in its part of /dev/shm.
    """

    front: ProcessUsage
    workers: ProcessUsage
    processes: int
    shared: int
    files: tuple[str, ...]


ALLOWANCE = ProcessUsage(memory=64 * MIB, descriptors=4, threads=16, memfds=0)
"""The growth allowed: the heap keeps what it cannot give back, up to 44 MiB after a quarter of an hour of attacks; gRPC
keeps a few descriptors for polling, and some threads. A leak of two of the workload's largest requests, 38 MiB each,
would be seen."""


def measure(service: RestartableServer) -> Usage:
    workers = [_of(pid) for pid in service.workers()]
    return Usage(
        _of(service.process.pid),
        ProcessUsage(
            max((worker.memory for worker in workers), default=0),
            max((worker.descriptors for worker in workers), default=0),
            max((worker.threads for worker in workers), default=0),
            max((worker.memfds for worker in workers), default=0),
        ),
        len(service.pids()),
        _status(service.process.pid, "RssShmem") * 1024,
        tuple(sorted(path.name for directory in service.files() if directory.is_dir() for path in directory.iterdir())),
    )


def wait_until_back(service: RestartableServer, before: Usage) -> None:
    """Waits until a server has released what it took since ``before``."""
    try:
        wait_until(lambda: not _growth(before, measure(service)), _RETURN_TIMEOUT_S, poll_s=0.2)
    except AssertionError:
        raise AssertionError(f"left after the fault: {'; '.join(_growth(before, measure(service)))}") from None


def _growth(before: Usage, now: Usage) -> list[str]:
    """Returns what has grown by more than is allowed, and processes or files that have changed."""
    grown = []
    for whose in ("front", "workers"):
        for what, allowance in vars(ALLOWANCE).items():
            then, amount = getattr(getattr(before, whose), what), getattr(getattr(now, whose), what)
            if amount > then + allowance:
                grown.append(f"{whose}: {what} {then} -> {amount}")
    if now.processes != before.processes:
        grown.append(f"processes {before.processes} -> {now.processes}")
    if now.files != before.files:
        grown.append(f"files {before.files} -> {now.files}")
    return grown


def _of(pid: int) -> ProcessUsage:
    return ProcessUsage(
        _status(pid, "RssAnon") * 1024, psutil.Process(pid).num_fds(), _status(pid, "Threads"), _memfds(pid)
    )


def _status(pid: int, field: str) -> int:
    return int(re.findall(rf"^{field}:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])


def _memfds(pid: int) -> int:
    inodes = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:" in line:
            inodes.add(line.split()[4])
    for path, what in descriptors_of(pid).items():
        if "/memfd:" in what:
            with suppress(FileNotFoundError):  # closed meanwhile
                inodes.add(str(path.stat().st_ino))
    return len(inodes)
