"""The pool of worker processes: one a device, restarted when it dies."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bngrad_kernels.spec import Spec
from bngrad_server.arena import Arena
from bngrad_server.batching import Batcher, Job, WorkerDiedError
from bngrad_server.worker import MAX_PACKET_NBYTES, OK, Message

logger = logging.getLogger(__name__)

_FIRST_RESTART_DELAY_S = 0.1
_LONGEST_RESTART_DELAY_S = 5.0
_EXIT_TIMEOUT_S = 5.0
_MAX_SPECS = 4096
"""What a worker remembers; beyond, numbers are used again."""


class WorkerState(enum.Enum):
    """What a device's worker is doing."""

    STARTING = "starting"
    READY = "ready"


class WorkerStartError(Exception):
    """A worker ended before it was ready, the first time it was started."""


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """What is known of a device.

    Attributes:
        name: Such as ``cpu``.
        description: The device in its maker's words; empty before its worker is first ready.
        state: What its worker is doing.
        restarts: How often its worker was started again.
    """

    name: str
    description: str
    state: WorkerState
    restarts: int


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """Memory beside the arena that workers map: its file descriptor and its size in bytes."""

    fd: int
    nbytes: int


class WorkerPool:
    """Starts a worker for each device, and offers it to the batcher."""

    def __init__(
        self, devices: Sequence[str], threads: int, arena: Arena, batcher: Batcher, on_change: Callable[[], None]
    ) -> None:
        """Starts nothing yet.

        Args:
            devices: What to compute on.
            threads: Threads of each CPU worker.
            arena: What the workers read and write.
            batcher: Whoever has work for them.
            on_change: Called, from any thread, whenever a worker became ready or died.
        """
        self._keepers = [_Keeper(device, threads, arena, batcher, on_change) for device in devices]
        self._regions: dict[int, MappedRegion] = {}
        self._mutex = threading.Lock()

    def start(self) -> None:
        """Returns once every worker is ready.

        Raises:
            WorkerStartError: A worker ended before it was ready.
        """
        for keeper in self._keepers:
            keeper.start(self._introduce)
        for keeper in self._keepers:
            keeper.wait_until_started()

    @property
    def is_ready(self) -> bool:
        """Whether at least one worker can take requests."""
        return any(status.state is WorkerState.READY for status in self.status())

    def status(self) -> list[DeviceStatus]:
        """The devices as they are now."""
        return [keeper.status() for keeper in self._keepers]

    def map(self, number: int, region: MappedRegion) -> None:
        """Has every worker map a region, also those that are started later."""
        with self._mutex:
            self._regions[number] = region
            for keeper in self._keepers:
                keeper.tell_worker(lambda worker: worker.map(number, region))

    def unmap(self, number: int) -> None:
        """Has every worker give up a region, which no job names any longer."""
        with self._mutex:
            del self._regions[number]
            for keeper in self._keepers:
                keeper.tell_worker(lambda worker: worker.unmap(number))

    def close(self) -> None:
        """Ends every worker."""
        for keeper in self._keepers:
            keeper.close()

    def _introduce(self, keeper: _Keeper, worker: _Worker) -> None:
        """Tells a new worker of all regions, and from then on of every change."""
        with self._mutex:
            for number, region in self._regions.items():
                worker.map(number, region)
            keeper.knows_regions = True


class _Keeper:
    """The thread that keeps one device's worker alive."""

    def __init__(
        self, device: str, threads: int, arena: Arena, batcher: Batcher, on_change: Callable[[], None]
    ) -> None:
        self.knows_regions = False
        self._worker: _Worker | None = None
        self._device = device
        self._threads = threads
        self._arena = arena
        self._batcher = batcher
        self._on_change = on_change
        self._description = ""
        self._restarts = 0
        self._ready = False
        self._closing = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"keeper-{device}", daemon=True)

    def start(self, introduce: Callable[[_Keeper, _Worker], None]) -> None:
        self._introduce = introduce
        self._thread.start()

    def wait_until_started(self) -> None:
        self._started.wait()
        if not self._description:
            raise WorkerStartError(f"the worker of device {self._device} ended before it was ready")

    def status(self) -> DeviceStatus:
        state = WorkerState.READY if self._ready else WorkerState.STARTING
        return DeviceStatus(self._device, self._description, state, self._restarts)

    def tell_worker(self, what: Callable[[_Worker], None]) -> None:
        """Tells the worker of a change of the regions; one that is starting or dead will be told of them all."""
        if self.knows_regions and self._worker is not None:
            with contextlib.suppress(WorkerDiedError):
                what(self._worker)

    def close(self) -> None:
        self._closing.set()
        if self._worker is not None:
            self._worker.hang_up()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        delay_s = _FIRST_RESTART_DELAY_S
        while not self._closing.is_set():
            try:
                with contextlib.closing(_Worker(self._device, self._threads, self._arena)) as worker:
                    self._worker = worker
                    self._description = worker.wait_until_ready()
                    delay_s = _FIRST_RESTART_DELAY_S
                    self._serve_with(worker)
            except WorkerDiedError as error:
                logger.error("worker of device %s: %s", self._device, error)
            except Exception:
                logger.exception("worker of device %s is given up", self._device)
            if not self._description or self._closing.wait(delay_s):
                break
            delay_s = min(2 * delay_s, _LONGEST_RESTART_DELAY_S)
            self._restarts += 1
        self._started.set()

    def _serve_with(self, worker: _Worker) -> None:
        """Has the worker in use until it dies or the pool closes."""
        self._introduce(self, worker)
        self._batcher.offer(worker)
        self._set_ready(True)
        self._started.set()
        if self._closing.is_set():  # too early for `close` to know of the worker
            worker.hang_up()
        exit_code = worker.wait_until_exit()
        self.knows_regions = False
        self._batcher.withdraw(worker)
        self._set_ready(False)
        if not self._closing.is_set():
            raise WorkerDiedError(f"ended with exit code {exit_code}")

    def _set_ready(self, ready: bool) -> None:
        self._ready = ready
        self._on_change()


class _Worker:
    """One worker process and the socket to it."""

    def __init__(self, device: str, threads: int, arena: Arena) -> None:
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_socket:
            fds = (child_socket.fileno(), arena.fd)
            arguments = [device, threads, *fds, arena.nbytes]
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "bngrad_server.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=fds,
                # Threads that spin for their next kernel would take the cores from the front process.
                env={"OMP_WAIT_POLICY": "passive", **os.environ},
            )
        self._spec_numbers: dict[Spec, int] = {}

    def wait_until_ready(self) -> str:
        """Its device's description."""
        return self._receive().decode()

    def run(self, batch: list[Job]) -> list[str | None]:
        """See `bngrad_server.batching.Worker`; by one thread at a time."""
        try:
            tasks = [job.task.pack(self._spec_number(job.spec)) for job in batch]
            self._send(Message.RUN + b"".join(tasks))
            answer = self._receive()
            return [None] * len(batch) if answer == OK else pickle.loads(answer)  # noqa: S301 - from our own worker
        except BaseException:
            self.hang_up()  # nobody leads it any more: its keeper starts another
            raise

    def map(self, number: int, region: MappedRegion) -> None:
        """Has it map a region, before it sees any later batch."""
        self._send(Message.MAP + pickle.dumps((number, region.nbytes)), region.fd)

    def unmap(self, number: int) -> None:
        """Has it give up a region, after all earlier batches."""
        self._send(Message.UNMAP + pickle.dumps(number))

    def wait_until_exit(self) -> int:
        """Its exit code."""
        return self._process.wait()

    def hang_up(self) -> None:
        """Ends the talk: that is its signal to end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the process, by force should it not end in time."""
        self.hang_up()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def _spec_number(self, spec: Spec) -> int:
        number = self._spec_numbers.get(spec)
        if number is None:
            if len(self._spec_numbers) >= _MAX_SPECS:
                self._spec_numbers.clear()
            number = self._spec_numbers[spec] = len(self._spec_numbers)
            self._send(Message.SPEC + pickle.dumps((number, spec)))
        return number

    def _send(self, packet: bytes, *fds: int) -> None:
        try:
            socket.send_fds(self._socket, [packet], fds) if fds else self._socket.send(packet)
        except OSError as error:
            raise WorkerDiedError(f"hung up: {error}") from error

    def _receive(self) -> bytes:
        try:
            packet = self._socket.recv(MAX_PACKET_NBYTES)
        except OSError as error:
            raise WorkerDiedError(f"hung up: {error}") from error
        if not packet:
            raise WorkerDiedError("hung up")
        return packet
