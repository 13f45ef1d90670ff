"""From a valid request to its results: admission, memory, queue and workers behind calls that know no gRPC."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bngrad_kernels import backends
from bngrad_server.codec.requests import Request
from bngrad_server.config import ServerConfig
from bngrad_server.errors import OverloadedError
from bngrad_server.memory.arena import Arena, Block
from bngrad_server.memory.regions import Regions
from bngrad_server.memory.transfer_watchdog import TransferWatchdog
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.malloc import MemoryTrimmer
from bngrad_server.scheduling.admission import Admission
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.staged_request import StagedRequest
from bngrad_server.telemetry.observer import Observer
from bngrad_server.workers.pool import WorkerPool

logger = logging.getLogger(__name__)


class Engine:
    """All that a request passes on its way: admission, memory, queue, workers.

    Attributes:
        device_remark: Why some or all GPUs are not used, where nobody named the devices; empty otherwise.
    """

    def __init__(self, config: ServerConfig, on_change: Callable[[], None], observer: Observer | None = None) -> None:
        self.admission = Admission(
            config.max_requests, config.max_wait_s, config.max_client_requests, config.max_client_bytes
        )
        names, remark = backends.devices(config.device)
        self.arena = Arena(_arena_nbytes(config, names))
        self.device_remark = remark or ""
        if remark:
            logger.info("computing on %s: %s", ", ".join(names), remark)
        split = config.has_cores_for_all or "cpu" not in names
        self.batcher = Batcher(config.max_batch_jobs, config.max_batch_bytes, config.max_batch_delay_s, split=split)
        self.pool = WorkerPool(config, names, self.arena, self.batcher, on_change)
        self.regions = Regions(config.shared_bytes, self.pool.map, self.pool.unmap)
        self.transfers = TransferWatchdog(config.transfer_timeout_s)
        self.observer = observer or Observer()
        self._trimmer = MemoryTrimmer(self.admission)
        self._max_wait_s = config.max_wait_s

    def stage(
        self, request: Request, caller: RpcContext, received_at: float, *, may_wait: bool = True
    ) -> StagedRequest | None:
        """Lends memory for a request until `StagedRequest.close`; gives None where there is none and nothing may wait.

        Args:
            request: The request.
            caller: Who made it.
            received_at: When its message was there, on the monotonic clock.
            may_wait: Whether to wait for memory.

        Raises:
            OverloadedError: There is too much to do already.
            InvalidArgumentError: The request names shared memory that is not there, or overlaps.
            ArenaTooSmallError: The request is larger than the arena.
            TimeoutError: No memory became free in time.
            CancelledError: The caller gave up.
        """
        self.admission.enter(caller.client, request.tensors_nbytes, caller.deadline)
        staged = StagedRequest(self, request, caller, received_at)
        try:
            if staged.take_memory(may_wait=may_wait):
                return staged
        except BaseException:
            staged.give_back()
            raise
        staged.give_back()
        return None

    def allocate(self, nbytes: int, caller: RpcContext) -> Block:
        """Takes a block of the arena for a caller.

        Raises:
            Exception: See `stage`.
        """
        give_up = time.monotonic() + self._max_wait_s
        if caller.deadline is not None and caller.deadline <= give_up:
            return self.arena.allocate(nbytes, caller.deadline, caller.is_cancelled)
        try:
            return self.arena.allocate(nbytes, give_up, caller.is_cancelled)
        except TimeoutError as error:
            raise OverloadedError(str(error), self._max_wait_s) from error

    @contextmanager
    def transfer(self, nbytes: int, caller: RpcContext) -> Iterator[None]:
        """Bounds the time that so many bytes of a staged request take to or from its caller."""
        with self.transfers.watched(nbytes, caller), self.admission.transfer():
            yield

    def close(self) -> None:
        """Ends the workers and gives up the arena."""
        self.batcher.close()
        self.pool.close()
        self.transfers.close()
        self._trimmer.close()
        self.arena.close()


def _arena_nbytes(config: ServerConfig, devices: Sequence[str]) -> int:
    """The arena's size; where nobody has named it, no more than a GPU's worker may page-lock."""
    if "arena_bytes" in config.model_fields_set or "cpu" in devices:
        return config.arena_bytes
    return min(config.arena_bytes, config.pinned_bytes) or config.arena_bytes
