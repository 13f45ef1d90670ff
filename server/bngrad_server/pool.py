"""The pool of worker processes: one a device, restarted when it dies, and what it held is run again."""

from __future__ import annotations

import contextlib
import enum
import logging
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bngrad_server.arena import Arena
from bngrad_server.batching import Batcher, Job
from bngrad_server.staging import Task

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""A job is given up when this many workers have died of it."""
_FIRST_RESTART_DELAY_S = 0.1
_LONGEST_RESTART_DELAY_S = 5.0
_EXIT_TIMEOUT_S = 5.0


class WorkerState(enum.Enum):
    """What a device's worker is doing."""

    STARTING = "starting"
    READY = "ready"


class WorkerStartError(Exception):
    """A worker ended before it was ready, the first time it was started."""


class ComputeError(Exception):
    """A request could not be computed, through no fault of its own."""


class _WorkerDiedError(Exception):
    """The process ended."""


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


class WorkerPool:
    """Keeps one worker process per device at work on what a batcher holds."""

    def __init__(
        self,
        devices: Sequence[str],
        threads: int,
        arena: Arena,
        batcher: Batcher,
        on_change: Callable[[], None],
    ) -> None:
        """Nothing runs before `start`.

        Args:
            devices: Names as `bngrad_kernels.backends.create` takes them.
            threads: Threads of each CPU worker.
            arena: Where the jobs are staged.
            batcher: Where the jobs wait.
            on_change: Called, on any thread, when a worker becomes ready or is lost.
        """
        self._batcher = batcher
        self._keepers = [_Keeper(device, threads, arena, batcher, on_change) for device in devices]

    def start(self) -> None:
        """Starts every worker and returns once all are ready.

        Raises:
            WorkerStartError: One could not start; its reason is on stderr.
        """
        for keeper in self._keepers:
            keeper.start()
        for keeper in self._keepers:
            keeper.wait_until_started()

    def status(self) -> list[DeviceStatus]:
        """The state of every device."""
        return [keeper.status() for keeper in self._keepers]

    @property
    def is_ready(self) -> bool:
        """Whether any worker takes requests."""
        return any(status.state is WorkerState.READY for status in self.status())

    def close(self) -> None:
        """Closes the batcher and ends every worker."""
        self._batcher.close()
        for keeper in self._keepers:
            keeper.close()


class _Keeper:
    """The thread that keeps one device's worker alive and feeds it."""

    def __init__(
        self, device: str, threads: int, arena: Arena, batcher: Batcher, on_change: Callable[[], None]
    ) -> None:
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

    def start(self) -> None:
        self._thread.start()

    def wait_until_started(self) -> None:
        self._started.wait()
        if not self._description:
            raise WorkerStartError(f"the worker of device {self._device} ended before it was ready")

    def status(self) -> DeviceStatus:
        state = WorkerState.READY if self._ready else WorkerState.STARTING
        return DeviceStatus(self._device, self._description, state, self._restarts)

    def close(self) -> None:
        self._closing.set()
        self._batcher.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        delay_s = _FIRST_RESTART_DELAY_S
        while not self._closing.is_set():
            try:
                with contextlib.closing(self._new_worker()) as worker:
                    self._description = worker.wait_until_ready()
                    delay_s = _FIRST_RESTART_DELAY_S
                    self._set_ready(True)
                    self._feed(worker)
            except _WorkerDiedError as error:
                logger.error("worker of device %s: %s", self._device, error)
            except Exception:
                logger.exception("worker of device %s is given up", self._device)
            self._set_ready(False)
            if not self._description or self._closing.wait(delay_s):
                break
            delay_s = min(2 * delay_s, _LONGEST_RESTART_DELAY_S)
            self._restarts += 1
        self._started.set()

    def _new_worker(self) -> _Worker:
        return _Worker(self._device, self._threads, self._arena, on_exit=self._batcher.wake)

    def _set_ready(self, ready: bool) -> None:
        self._ready = ready
        self._on_change()
        if ready:
            self._started.set()

    def _feed(self, worker: _Worker) -> None:
        """Hands batches to a worker until it dies or the pool closes."""
        while batch := self._batcher.take(abandoned=lambda: worker.has_exited or self._closing.is_set()):
            try:
                failures = worker.run(batch)
            except Exception:
                self._rescue(batch)
                raise
            for job, failure in zip(batch, failures, strict=True):
                if failure is None:
                    job.done.set_result(None)
                else:
                    job.done.set_exception(ComputeError(f"the {self._device} back end failed: {failure}"))
        if not self._closing.is_set():
            raise _WorkerDiedError(f"ended with exit code {worker.exit_code()} while idle")

    def _rescue(self, batch: list[Job]) -> None:
        """Queues again what a dead worker held, save for jobs that have cost too many workers."""
        self._batcher.put_back([job for job in batch if job.attempts < MAX_ATTEMPTS])
        for job in batch:
            if job.attempts >= MAX_ATTEMPTS:
                job.done.set_exception(ComputeError(f"{job.attempts} workers died while computing this request"))


class _Worker:
    """One worker process and the pipe to it."""

    def __init__(self, device: str, threads: int, arena: Arena, on_exit: Callable[[], None]) -> None:
        self._pipe, child_pipe = multiprocessing.Pipe()
        with child_pipe:
            fds = (child_pipe.fileno(), arena.fd)
            arguments = [device, threads, *fds, arena.nbytes]
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "bngrad_server.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=fds,
            )
        self.has_exited = False
        self._on_exit = on_exit
        self._watcher = threading.Thread(target=self._watch, name=f"watcher-{device}", daemon=True)
        self._watcher.start()

    def wait_until_ready(self) -> str:
        description = self._receive()
        assert isinstance(description, str)
        return description

    def run(self, batch: list[Job]) -> list[str | None]:
        try:
            self._pipe.send([Task(job.spec, job.offset, job.has_scale) for job in batch])
        except OSError as error:
            raise _WorkerDiedError(f"ended with exit code {self.exit_code()}") from error
        failures = self._receive()
        assert isinstance(failures, list)
        return failures

    def exit_code(self) -> int:
        """Waits for the end of a process that is known to be ending."""
        self._watcher.join()
        return self._process.returncode

    def close(self) -> None:
        """Ends the process: its pipe closes, and that is its signal."""
        self._pipe.close()
        self._watcher.join(_EXIT_TIMEOUT_S)
        if not self.has_exited:
            self._process.kill()
            self._watcher.join()

    def _receive(self) -> object:
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _WorkerDiedError(f"ended with exit code {self.exit_code()}") from error

    def _watch(self) -> None:
        self._process.wait()
        self.has_exited = True
        self._on_exit()
