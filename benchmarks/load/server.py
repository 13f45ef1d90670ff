"""The server under load: started on its own cores, its memory sampled, its workers killed."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc
import psutil
from benchmarks.warm_server import WarmServer

from bngrad_cli.embedded import ServerStartError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc

__all__ = ["Memory", "Server", "ServerStartError", "robbed", "running", "watched"]

_ASK_TIMEOUT_S = 30.0
_WATCH_EVERY_S = 0.5
_WORKER_MODULE = "bngrad_server.workers.main"
_BATCH_SIZES = "batch_sizes"
"""The field of ServerInfoResponse with the batches computed so far: at index k, those of 2**k to 2**(k+1)-1 requests.
Older servers have none."""


@dataclass(frozen=True)
class Server:
    """A running server; ``front`` is its front process, None if the benchmark did not start it."""

    target: str
    front: psutil.Process | None

    def processes(self) -> list[psutil.Process]:
        return [] if self.front is None else [self.front, *self.front.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        workers = []
        for process in self.processes()[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if _WORKER_MODULE in process.cmdline():
                    workers.append(process)
        return workers

    def cpu_seconds(self) -> float:
        """Returns the CPU time of its processes, dead ones included."""
        if self.front is None:
            return 0.0
        reaped = self.front.cpu_times()
        used = reaped.children_user + reaped.children_system
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used += times.user + times.system
        return used

    def info(self) -> pb.ServerInfoResponse:
        with grpc.insecure_channel(self.target) as channel:
            stub = pb_grpc.BatchNormGradServiceStub(channel)
            return stub.ServerInfo(pb.ServerInfoRequest(), timeout=_ASK_TIMEOUT_S)

    def batch_sizes(self) -> list[int] | None:
        """Returns the number of batches of 2**k to 2**(k+1)-1 requests so far; None if not reported."""
        sizes = getattr(self.info(), _BATCH_SIZES, None)
        return None if sizes is None else list(sizes)

    def wait_until_ready(self) -> None:
        while any(device.state != pb.WORKER_STATE_READY for device in self.info().devices):
            time.sleep(0.05)


@contextlib.contextmanager
def running(cores: tuple[int, ...], options: tuple[str, ...]) -> Iterator[Server]:
    """Runs a server on some cores for the length of the block."""
    own = os.sched_getaffinity(0)
    embedded = WarmServer(options=options)
    os.sched_setaffinity(0, cores)  # Its processes inherit this, and derive their number of threads from it.
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(embedded)
        finally:
            os.sched_setaffinity(0, own)
        yield Server(embedded.target, psutil.Process(embedded.process.pid))


@dataclass
class Memory:
    """Resident memory over time, in MB.

    Attributes:
        seconds: When, on the monotonic clock.
        front: Of the front process, shared pages included.
        workers: Of all workers together; pages that several processes map count for each of them.
        private: Of all processes together, without pages that could be shared.
    """

    seconds: list[float] = field(default_factory=list)
    front: list[float] = field(default_factory=list)
    workers: list[float] = field(default_factory=list)
    private: list[float] = field(default_factory=list)

    def note(self, server: Server) -> None:
        totals = []
        private = 0.0
        for process in server.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                memory = process.memory_info()
                totals.append(memory.rss / 1e6)
                private += (memory.rss - memory.shared) / 1e6
        self.seconds.append(time.monotonic())
        self.front.append(totals[0] if totals else 0.0)
        self.workers.append(sum(totals[1:]))
        self.private.append(private)


@contextlib.contextmanager
def watched(server: Server) -> Iterator[Memory]:
    """Samples the server's memory twice a second."""
    memory = Memory()
    with _repeated(_WATCH_EVERY_S, lambda: memory.note(server)):
        yield memory


@contextlib.contextmanager
def robbed(server: Server, every_s: float) -> Iterator[list[float]]:
    """Kills a random worker every ``every_s`` seconds; gives the times of the kills."""
    kills: list[float] = []

    def kill() -> None:
        workers = server.workers()
        if workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                random.choice(workers).kill()  # noqa: S311 - no secret
                kills.append(time.monotonic())

    with _repeated(every_s, kill):
        yield kills


@contextlib.contextmanager
def _repeated(every_s: float, what: Callable[[], None]) -> Iterator[None]:
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(psutil.NoSuchProcess):
                what()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
