"""From a valid request to its results: admission, memory, queue and workers, without gRPC."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
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
from bngrad_server.scheduling.dispatch import run
from bngrad_server.staged_request import StagedRequest
from bngrad_server.telemetry.observer import Observer
from bngrad_server.workers.pool import WorkerPool

logger = logging.getLogger(__name__)


class Engine:
    """All that a request passes on its way: admission, memory, queue, workers.

    Attributes:
        device_remark: Why some or all GPUs are not used, where the settings name no device; empty otherwise.
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
        self._trimmer = MemoryTrimmer(lambda: self.admission.entered, lambda: self.admission.requests)
        self._max_wait_s = config.max_wait_s

    def stage(
        self, request: Request, rpc: RpcContext, received_at: float, *, may_wait: bool = True
    ) -> StagedRequest | None:
        """Admits a request and takes memory for it, until `StagedRequest.close`.

        Args:
            request: The request.
            rpc: The call that it came with.
            received_at: When its message had arrived, on the monotonic clock.
            may_wait: Whether to wait for memory; otherwise the result is None where there is none.

        Raises:
            OverloadedError: The server is full.
            InvalidArgumentError: The request names shared memory that does not exist, or tensors overlap there.
            ArenaTooSmallError: The request is larger than the arena.
            TimeoutError: No memory became free in time.
            CancelledError: The client cancelled the call.
        """
        self.admission.enter(rpc.client, request.tensors_nbytes, rpc.deadline)
        staged = StagedRequest(request, rpc, received_at, self.arena, self.regions, self._close)
        try:
            nbytes = staged.hold_regions()
            block = self._allocate(nbytes, rpc) if may_wait else self.arena.allocate_at_once(nbytes)
            if block is not None:
                staged.place(block)
                return staged
        except BaseException:
            self._release(staged)
            raise
        self._release(staged)
        return None

    def compute(self, staged: StagedRequest) -> None:
        """Has a worker write the outputs, and waits for it.

        Raises:
            TimeoutError: It took too long.
            CancelledError: The client cancelled the call, or the server is stopping.
            ComputeError: No worker could compute it.
        """
        run(self.batcher, staged.new_job())
        staged.check()

    def submit(self, staged: StagedRequest, on_end: Callable[[], None]) -> None:
        """Has a worker write the outputs, and does not wait; see `bngrad_server.scheduling.batcher.Batcher.submit`.

        `StagedRequest.check` tells the outcome.

        Raises:
            CancelledError: The server is stopping.
        """
        self.batcher.submit(staged.new_job(on_end))

    @contextmanager
    def transfer(self, nbytes: int, rpc: RpcContext) -> Iterator[None]:
        """Limits the time that the transfer of a staged request's bytes to or from its client takes."""
        with self.transfers.watched(nbytes, rpc), self.admission.transfer():
            yield

    def close(self) -> None:
        """Ends the workers and closes the arena."""
        self.batcher.close()
        self.pool.close()
        self.transfers.close()
        self._trimmer.close()
        self.arena.close()

    def _allocate(self, nbytes: int, rpc: RpcContext) -> Block:
        """Takes a block of the arena, and waits for it; see `stage`."""
        deadline = time.monotonic() + self._max_wait_s
        if rpc.deadline is not None and rpc.deadline <= deadline:
            return self.arena.allocate(nbytes, rpc.deadline, rpc.is_cancelled)
        try:
            return self.arena.allocate(nbytes, deadline, rpc.is_cancelled)
        except TimeoutError as error:
            raise OverloadedError(str(error), self._max_wait_s) from error

    def _close(self, staged: StagedRequest, error: BaseException | None) -> None:
        """Releases a staged request, and has the observer count it."""
        self._release(staged)
        request, rpc, job = staged.request, staged.rpc, staged.job
        if error is not None or not staged.is_computed or job is None:
            reason = error or CancelledError()
            self.observer.failed(request.op.name, request.transport, rpc, reason, staged.received_at)
            return
        staged_at = (staged.received_at, staged.decoded_at, staged.placed_at)
        timestamps = (*staged_at, job.arrival, job.started_at, job.ended_at, time.monotonic())
        self.observer.metrics.answered(request.series, request.tensors_nbytes, timestamps)
        if self.observer.tracing is not None:
            self.observer.tracing.answered(request, rpc, timestamps)

    def _release(self, staged: StagedRequest) -> None:
        """Ends the admission of a request, and releases its memory once no worker touches it."""
        if staged.job is None:
            staged.release()
        else:
            self.batcher.when_untouched(staged.job, staged.release)
        self.admission.leave(staged.rpc.client, staged.request.tensors_nbytes, computed=staged.is_computed)


def _arena_nbytes(config: ServerConfig, devices: Sequence[str]) -> int:
    """The arena's size; unless the settings name it, no more than a GPU's worker may page-lock."""
    if "arena_bytes" in config.model_fields_set or "cpu" in devices:
        return config.arena_bytes
    return min(config.arena_bytes, config.pinned_bytes) or config.arena_bytes
