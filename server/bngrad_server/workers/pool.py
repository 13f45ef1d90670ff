"""The pool of worker processes: one a GPU, several a CPU, watched, and replaced when they die or hang."""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bngrad_server.config import ServerConfig
from bngrad_server.errors import WorkerDiedError, WorkerStartError
from bngrad_server.memory.arena import Arena
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.workers.main import BEAT, FAILED, READY
from bngrad_server.workers.process import WorkerProcess
from bngrad_server.workers.slot import MappedRegion

logger = logging.getLogger(__name__)

_FIRST_RESTART_DELAY_S = 0.05
_LONGEST_RESTART_DELAY_S = 5.0
_SOUND_AFTER_S = 1.0
"""A worker that was in use for so long did not die of its start."""
_BEATS_PER_TIMEOUT = 10
_SLOTS_OF_A_GPU = 2
"""While one batch is copied out, the next is copied in. A CPU's threads are all taken by one batch."""
_START_TIMEOUT_S = 60.0
"""For processors that have much else to do while Python starts, until the first sign of life; and for drivers that take
long over many GPUs or much memory to page-lock, and let no other thread run meanwhile."""


class WorkerState(enum.Enum):
    """What a device's worker is doing."""

    STARTING = "starting"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """What is known of a device.

    Attributes:
        name: Such as ``cpu``.
        description: The device in its maker's words; empty before its worker is first ready.
        memory_bytes: The size of its own memory; 0 for a CPU.
        memory_used_bytes: How much of that its worker has taken.
        state: What its worker is doing.
        restarts: How often its worker was started again.
        busy_s: For how long its workers have computed, in seconds.
        resident_bytes: The memory that its worker has in use, shared memory included.
    """

    name: str
    description: str
    memory_bytes: int
    memory_used_bytes: int
    state: WorkerState
    restarts: int
    busy_s: float
    resident_bytes: int


class WorkerPool:
    """Starts a worker for each device, and offers it to the batcher."""

    def __init__(
        self,
        config: ServerConfig,
        devices: Sequence[str],
        arena: Arena,
        batcher: Batcher,
        on_change: Callable[[], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            config: How many workers a CPU has, and how long one may be silent.
            devices: What they compute on; a GPU has one worker.
            arena: What the workers read and write.
            batcher: Whoever has work for them.
            on_change: Called, from any thread, whenever a worker became ready or died.
        """
        timeout_s = config.worker_timeout_s

        def start(device: str) -> WorkerProcess:
            beat_s = timeout_s / _BEATS_PER_TIMEOUT
            slots = 1 if device == "cpu" else _SLOTS_OF_A_GPU
            return WorkerProcess(device, config.threads, arena, config.pinned_bytes, beat_s, slots)

        self._keepers = [
            _Keeper(name, functools.partial(start, device), timeout_s, batcher, self._introduce, on_change)
            for device in devices
            for name in _worker_names(device, config.workers)
        ]
        self._regions: dict[int, MappedRegion] = {}
        self._mutex = threading.Lock()

    def start(self) -> None:
        """Returns once every worker is ready.

        Raises:
            WorkerStartError: A worker ended before it was ready.
        """
        for keeper in self._keepers:
            keeper.start()
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
            keeper.begin_to_close()
        for keeper in self._keepers:
            keeper.close()

    def _introduce(self, keeper: _Keeper, worker: WorkerProcess) -> None:
        """Tells a new worker of all regions, and from then on of every change."""
        with self._mutex:
            for number, region in self._regions.items():
                worker.map(number, region)
            keeper.knows_regions = True


def _worker_names(device: str, cpu_workers: int) -> list[str]:
    return [device] if device != "cpu" or cpu_workers == 1 else [f"cpu:{number}" for number in range(cpu_workers)]


class _Keeper:
    """The thread that keeps one device's worker alive."""

    def __init__(
        self,
        name: str,
        start: Callable[[], WorkerProcess],
        timeout_s: float,
        batcher: Batcher,
        introduce: Callable[[_Keeper, WorkerProcess], None],
        on_change: Callable[[], None],
    ) -> None:
        self.knows_regions = False
        self._worker: WorkerProcess | None = None
        self._name = name
        self._start = start
        self._timeout_s = timeout_s
        self._batcher = batcher
        self._introduce = introduce
        self._on_change = on_change
        self._description = ""
        self._memory_bytes = self._memory_used_bytes = 0
        self._failure = ""
        self._restarts = 0
        self._busy_before_s = 0.0  # by the workers before
        self._ready_since: float | None = None
        self._closing = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"keeper-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_started(self) -> None:
        self._started.wait()
        if not self._description:
            if self._failure:
                raise WorkerStartError(f"device {self._name} cannot be used: {self._failure}")
            raise WorkerStartError(f"the worker of device {self._name} ended before it was ready")

    def status(self) -> DeviceStatus:
        state = WorkerState.STARTING if self._ready_since is None else WorkerState.READY
        worker = self._worker
        busy_s, resident_bytes = (0.0, 0) if worker is None else (worker.busy_s, worker.resident_bytes)
        memory = self._memory_bytes, self._memory_used_bytes
        return DeviceStatus(
            self._name, self._description, *memory, state, self._restarts, busy_s + self._busy_before_s, resident_bytes
        )

    def tell_worker(self, what: Callable[[WorkerProcess], None]) -> None:
        """Tells the worker of a change of the regions; one that is starting or dead will be told of them all."""
        if self.knows_regions and self._worker is not None:
            with contextlib.suppress(WorkerDiedError):
                what(self._worker)

    def begin_to_close(self) -> None:
        self._closing.set()
        if self._worker is not None:
            self._worker.hang_up()
            if self._ready_since is None:  # it would hear of that only once its kernels are compiled
                self._worker.kill()

    def close(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def _keep(self) -> None:
        delay_s = _FIRST_RESTART_DELAY_S
        while not self._closing.is_set():
            try:
                was_sound = self._keep_one()
            except Exception:
                logger.exception("worker of device %s cannot be started", self._name)
                was_sound = False
            delay_s = _FIRST_RESTART_DELAY_S if was_sound else min(2 * delay_s, _LONGEST_RESTART_DELAY_S)
            if not self._description or self._closing.wait(delay_s):
                break
            self._restarts += 1
        self._started.set()

    def _keep_one(self) -> bool:
        """Has a worker in use until it ends, and says whether that was for long."""
        worker, before = self._start(), self._worker
        busy_before_s = self._busy_before_s + (before.busy_s if before is not None else 0.0)
        self._worker, self._busy_before_s = worker, busy_before_s
        try:
            if self._closing.is_set():  # too early for `begin_to_close` to know of it
                return True
            reason = self._watch(worker)
        finally:
            self.knows_regions = False
            self._batcher.withdraw(worker)
            ready_since, self._ready_since = self._ready_since, None
            self._on_change()
            ending = worker.close()
        if not self._closing.is_set():
            logger.error("worker of device %s %s%s", self._name, ending, reason)
        return ready_since is not None and time.monotonic() - ready_since > _SOUND_AFTER_S

    def _watch(self, worker: WorkerProcess) -> str:
        """Returns when the worker has ended, or was killed, and why."""
        self._failure = ""
        silences, has_shown_life = 0, False
        while True:
            is_starting = not has_shown_life or (self._ready_since is None and self._name.startswith("cuda"))
            timeout_s = max(self._timeout_s, _START_TIMEOUT_S) if is_starting else self._timeout_s
            sign = worker.sign_of_life(timeout_s / 2)
            has_shown_life |= sign is not None
            if sign == b"":
                return f": {self._failure}" if self._failure else ""
            # Two silences in a row: the first may be this process's own, which was stopped for a while.
            silences = silences + 1 if sign is None else 0
            if silences == 2:
                worker.kill()
                return f" for showing no life for {timeout_s:g} s"
            if worker.is_late:
                worker.kill()
                return " for taking too long over a batch"
            with contextlib.suppress(WorkerDiedError):  # of which the next sign tells
                worker.catch_up()
            if sign is not None and sign.startswith(READY):
                self._put_to_use(worker, *pickle.loads(sign[len(READY) :]))  # noqa: S301 - from our own worker
            elif sign is not None and sign.startswith(BEAT):
                self._memory_used_bytes = int(sign[len(BEAT) :])
            elif sign is not None and sign.startswith(FAILED):
                self._failure = sign[len(FAILED) :].decode(errors="replace")

    def _put_to_use(self, worker: WorkerProcess, description: str, memory_bytes: int) -> None:
        self._introduce(self, worker)
        self._description, self._memory_bytes = description, memory_bytes
        self._ready_since = time.monotonic()
        for _ in range(worker.slots):
            self._batcher.offer(worker)
        self._on_change()
        self._started.set()
