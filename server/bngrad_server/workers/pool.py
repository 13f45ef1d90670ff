"""The pool of worker processes: one for each GPU, several for a CPU."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from bngrad_server.config import ServerConfig
from bngrad_server.memory.arena import Arena
from bngrad_server.memory.layout import Place
from bngrad_server.memory.regions import Region
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.workers.ipc import AheadChange
from bngrad_server.workers.kernel_compiler import KernelCompiler
from bngrad_server.workers.process import WorkerProcess
from bngrad_server.workers.supervisor import DeviceStatus, Supervisor

logger = logging.getLogger(__name__)

_HEARTBEATS_PER_TIMEOUT = 10
_PATIENCE_S = 3.0
_PROGRESS_EVERY_S = 10.0
_STOP_TIMEOUT_S = 3.0
_SLOTS_OF_A_GPU = 2
"""While one batch is copied out, the next is copied in. A CPU's threads are all taken by one batch."""


class WorkerPool:
    """Starts the workers of every device, and offers them to the batcher."""

    def __init__(
        self,
        config: ServerConfig,
        devices: Sequence[str],
        arena: Arena,
        batcher: Batcher,
        on_change: Callable[[], None],
    ) -> None:
        """Starts nothing yet; calls ``on_change``, from any thread, whenever a worker became ready or died."""
        timeout_s = config.worker_timeout_s

        def start(device: str) -> WorkerProcess:
            heartbeat_s = timeout_s / _HEARTBEATS_PER_TIMEOUT
            return WorkerProcess(device, config, arena, heartbeat_s, _slots_of(device))

        self._supervisors = [
            Supervisor(name, functools.partial(start, device), timeout_s, batcher, on_change)
            for device in devices
            for name in _worker_names(device, config.workers)
        ]
        self._gpus = [supervisor for supervisor in self._supervisors if _has_gpu(supervisor.name)]
        self._copy_numbers = itertools.count(1)
        self._compiler = KernelCompiler() if "cpu" in devices else None

    def start(self) -> None:
        """Returns once every worker is ready, which on a CPU means that it can compute most requests.

        Raises:
            WorkerStartError: A worker ended before it was ready.
        """
        for supervisor in self._supervisors:
            supervisor.start()
        if self._compiler is not None:
            self._compiler.start()
        started_at, timeout_s = time.monotonic(), _PATIENCE_S
        for supervisor in self._supervisors:
            while not supervisor.wait_until_ready(timeout_s):
                taken_s = time.monotonic() - started_at
                logger.info("waiting for the workers: %.0f s", taken_s)
                timeout_s = _PROGRESS_EVERY_S

    @property
    def is_ready(self) -> bool:
        """Whether at least one worker can take requests."""
        return any(supervisor.is_ready for supervisor in self._supervisors)

    @property
    def slots(self) -> int:
        """How many batches the workers that are ready can compute at a time."""
        return sum(_slots_of(supervisor.name) for supervisor in self._supervisors if supervisor.is_ready)

    @property
    def compiling(self) -> tuple[str, ...]:
        """The CPU kernels that are still to be compiled."""
        return () if self._compiler is None else self._compiler.compiling

    def status(self) -> list[DeviceStatus]:
        """The devices as they are now."""
        return [supervisor.status() for supervisor in self._supervisors]

    def resident_bytes(self) -> list[int]:
        """How much memory the worker of each device has in use, shared memory included."""
        return [supervisor.resident_bytes() for supervisor in self._supervisors]

    def map(self, region: Region) -> None:
        """Has every worker map a region, also those that are started later."""
        for supervisor in self._supervisors:
            supervisor.map(region)

    def unmap(self, region: Region) -> None:
        """Has every worker unmap a region, which no job names."""
        for supervisor in self._supervisors:
            supervisor.unmap(region)

    @property
    def has_gpus(self) -> bool:
        """Whether any worker has a GPU."""
        return bool(self._gpus)

    def copy_ahead(self, place: Place, nbytes: int) -> int:
        """Has one of the GPUs copy a tensor ahead of its request, and returns the number of the copy."""
        number = next(self._copy_numbers)
        self._gpu_of(number).change_ahead(AheadChange(number, place.memory, place.offset, nbytes))
        return number

    def drop_copy(self, number: int) -> None:
        """Has that GPU drop the copy of a number."""
        self._gpu_of(number).change_ahead(AheadChange(number))

    def _gpu_of(self, number: int) -> Supervisor:
        return self._gpus[number % len(self._gpus)]

    def close(self) -> None:
        """Ends every worker, by force should it not end in time."""
        if self._compiler is not None:
            self._compiler.close()
        for supervisor in self._supervisors:
            supervisor.begin_to_stop()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for supervisor in self._supervisors:
            supervisor.stop(max(deadline - time.monotonic(), 0))


def _has_gpu(worker: str) -> bool:
    return worker.partition(":")[0] != "cpu"


def _slots_of(worker: str) -> int:
    return _SLOTS_OF_A_GPU if _has_gpu(worker) else 1


def _worker_names(device: str, cpu_workers: int) -> list[str]:
    return [device] if device != "cpu" or cpu_workers == 1 else [f"cpu:{number}" for number in range(cpu_workers)]
