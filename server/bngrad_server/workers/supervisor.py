"""Supervises the worker of one device: starts it, watches it, and replaces it when it dies or hangs."""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bngrad_server.errors import WorkerDiedError, WorkerStartError
from bngrad_server.memory.regions import Region
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.workers.ipc import AheadChange, Report, unpickled
from bngrad_server.workers.process import WorkerProcess

logger = logging.getLogger(__name__)

_FIRST_RESTART_DELAY_S = 0.05
_LONGEST_RESTART_DELAY_S = 5.0
_SOUND_AFTER_S = 1.0
"""A worker that was ready for this long did not die of its start."""
_START_TIMEOUT_S = 60.0
"""Until the worker is ready: libraries that come from a slow disk, and drivers of GPUs, let no other thread run while
they are loaded."""
_PAUSE_S = 1.0
"""A look at a worker that is so late shows that this process was stopped meanwhile, or got no processor."""
_EXCUSED_S = 30.0
"""For how long no batch is late after that: the worker was perhaps stopped, too."""


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
    """

    name: str
    description: str
    memory_bytes: int
    memory_used_bytes: int
    state: WorkerState
    restarts: int
    busy_s: float


class Supervisor:
    """The thread that keeps a worker running.

    Attributes:
        name: The worker's name.
    """

    def __init__(
        self,
        name: str,
        start_process: Callable[[], WorkerProcess],
        timeout_s: float,
        batcher: Batcher,
        on_change: Callable[[], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            name: The worker's name: its device, with a number where the device has several.
            start_process: Starts a worker process.
            timeout_s: How long a worker may send no heartbeat, in seconds.
            batcher: Is offered the slots of workers that are ready.
            on_change: Called, from the supervisor's thread, whenever the worker became ready or died.
        """
        self.name = name
        self._start_process = start_process
        self._timeout_s = timeout_s
        self._batcher = batcher
        self._on_change = on_change
        self._worker: WorkerProcess | None = None
        self._description = ""
        self._memory_bytes = self._memory_used_bytes = 0
        self._failure = ""
        self._restarts = 0
        self._ready_since: float | None = None
        self._ended_at: float | None = None  # the worker before
        self._closing = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"supervisor-{name}", daemon=True)
        self._mutex = threading.Lock()  # guards what follows
        self._busy_before_s = 0.0  # by the workers before
        self._regions: dict[int, Region] = {}
        self._mapping: WorkerProcess | None = None
        """The worker that has been sent all regions, and is sent every change."""

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Waits until the worker was ready once; returns whether it was, within the timeout.

        Raises:
            WorkerStartError: It ended before.
        """
        if not self._started.wait(timeout_s):
            return False
        if not self._description:
            if self._failure:
                raise WorkerStartError(f"device {self.name} cannot be used: {self._failure}")
            raise WorkerStartError(f"the worker of device {self.name} ended before it was ready")
        return True

    @property
    def is_ready(self) -> bool:
        """Whether the worker can take requests."""
        return self._ready_since is not None

    def status(self) -> DeviceStatus:
        """The state of the device and its worker."""
        state = WorkerState.READY if self.is_ready else WorkerState.STARTING
        with self._mutex:  # or a worker that is just replaced could count twice
            busy_s = self._busy_before_s + (0.0 if self._worker is None else self._worker.busy_s)
        memory = self._memory_bytes, self._memory_used_bytes
        return DeviceStatus(self.name, self._description, *memory, state, self._restarts, busy_s)

    def resident_bytes(self) -> int:
        """Asks the system how much memory the worker has in use, shared memory included; 0 if there is none."""
        worker = self._worker
        return 0 if worker is None else worker.resident_bytes

    def map(self, region: Region) -> None:
        """Has the worker map a region, and those that are started later."""
        with self._mutex, contextlib.suppress(WorkerDiedError):
            self._regions[region.number] = region
            if self._mapping is not None:
                self._mapping.change_region(region.number, region)

    def unmap(self, region: Region) -> None:
        """Has the worker unmap a region, which no job names."""
        with self._mutex, contextlib.suppress(WorkerDiedError):
            del self._regions[region.number]
            if self._mapping is not None:
                self._mapping.change_region(region.number, None)

    def change_ahead(self, change: AheadChange) -> None:
        """See `WorkerProcess.change_ahead`; a worker that is started later has no copies."""
        with self._mutex:
            if self._mapping is not None:
                self._mapping.change_ahead(change)

    def begin_to_stop(self) -> None:
        """Tells the worker to end; it is not started again."""
        self._closing.set()
        if self._worker is not None:
            self._worker.shut_down()
            if self._ready_since is None:  # it would notice that only once its kernels are compiled
                self._worker.kill()

    def stop(self, timeout_s: float) -> None:
        """Waits, after `begin_to_stop`, until the worker has ended, and kills it after the timeout."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._worker is not None:
                self._worker.kill()
            self._thread.join()

    def _run(self) -> None:
        delay_s = _FIRST_RESTART_DELAY_S
        while not self._closing.is_set():
            try:
                was_sound = self._run_worker()
            except Exception:
                logger.exception("the worker of device %s cannot be started", self.name)
                was_sound = False
            delay_s = _FIRST_RESTART_DELAY_S if was_sound else min(2 * delay_s, _LONGEST_RESTART_DELAY_S)
            if not self._description or self._closing.wait(delay_s):
                break
            self._restarts += 1
        self._started.set()

    def _run_worker(self) -> bool:
        """Keeps a worker in use until it ends, and returns whether that was for long."""
        worker, before = self._start_process(), self._worker
        with self._mutex:
            self._worker = worker
            self._busy_before_s += 0.0 if before is None else before.busy_s
        try:
            if self._closing.is_set():  # `begin_to_stop` came too early to see this worker
                return True
            reason = self._watch(worker)
        finally:
            with self._mutex:
                self._mapping = None
            self._batcher.withdraw(worker)
            ready_since, self._ready_since = self._ready_since, None
            self._on_change()
            ending = worker.close()
        if not self._closing.is_set() and (self._description or not self._failure):  # else the server ends with it
            logger.error("worker of device %s %s%s", self.name, ending, reason)
            self._ended_at = time.monotonic()
        return ready_since is not None and time.monotonic() - ready_since > _SOUND_AFTER_S

    def _watch(self, worker: WorkerProcess) -> str:
        """Returns once the worker has ended, or was killed, with the reason."""
        self._failure = ""
        silences, excused_until = 0, -math.inf
        while True:
            is_starting = self._ready_since is None
            timeout_s = max(self._timeout_s, _START_TIMEOUT_S) if is_starting else self._timeout_s
            due_at = time.monotonic() + timeout_s / 2
            packet = worker.receive_report(timeout_s / 2)
            now = time.monotonic()
            if now >= due_at + _PAUSE_S:
                excused_until = now + _EXCUSED_S
            if packet == b"":
                return f": {self._failure}" if self._failure else ""
            # Two silences in a row: in the first, this process itself may have been stopped for a while.
            silences = silences + 1 if packet is None else 0
            if silences == 2:
                worker.kill()
                return f" for sending no heartbeat for {timeout_s:g} s"
            if worker.is_late and now >= excused_until:
                worker.kill()
                return " for taking too long over a batch"
            with contextlib.suppress(WorkerDiedError):  # then the next packet is empty
                if packet is not None:
                    self._handle(packet, worker)
                worker.flush_pending()

    def _handle(self, packet: bytes, worker: WorkerProcess) -> None:
        kind, content = packet[:1], packet[1:]
        if kind == Report.READY:
            self._put_to_use(worker, *unpickled(content))
        elif kind == Report.HEARTBEAT:
            self._memory_used_bytes = int(content)
        elif kind == Report.FAILED:
            self._failure = content.decode(errors="replace")

    def _put_to_use(self, worker: WorkerProcess, description: str, memory_bytes: int) -> None:
        with self._mutex:
            for number, region in self._regions.items():
                worker.change_region(number, region)
            self._mapping = worker
        self._description, self._memory_bytes = description, memory_bytes
        self._ready_since = time.monotonic()
        if self._ended_at is not None:
            away_s = self._ready_since - self._ended_at
            logger.info("worker of device %s is ready again, %.1f s after the one before it ended", self.name, away_s)
        for _ in range(worker.slots):
            self._batcher.offer(worker)
        self._on_change()
        self._started.set()
