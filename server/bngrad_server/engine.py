"""From a valid request to its results: admission, memory, queue and workers, without gRPC."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial

from bngrad_kernels import backends
from bngrad_server.codec.request import Request
from bngrad_server.config import ServerConfig
from bngrad_server.errors import OverloadedError
from bngrad_server.front.kernels import FrontKernels
from bngrad_server.front.shared_requests import SharedRequests
from bngrad_server.front.small_requests import SmallRequests
from bngrad_server.memory.allocator import Allocator, Block
from bngrad_server.memory.arena import Arena
from bngrad_server.memory.received_message import ReceivedMessage
from bngrad_server.memory.regions import Region, Regions
from bngrad_server.memory.transfer_watchdog import TransferWatchdog
from bngrad_server.rpc_context import RpcContext
from bngrad_server.runtime.malloc import MemoryTrimmer
from bngrad_server.scheduling.admission import Admission
from bngrad_server.scheduling.batcher import Batcher
from bngrad_server.scheduling.dispatch import run
from bngrad_server.sent_ahead import SentAhead
from bngrad_server.staged_request import StagedRequest
from bngrad_server.telemetry.load import LoadMeter
from bngrad_server.telemetry.metrics import Timestamps
from bngrad_server.telemetry.observer import Observer
from bngrad_server.workers.pool import WorkerPool
from bngrad_wire.chunks import MessageSource
from bngrad_wire.fields import Buffer

logger = logging.getLogger(__name__)

_MESSAGES_FRACTION = 4
"""Messages that the HTTP/2 port receives whole take memory up to one part in this many of the arena's size."""
_SMALL_MESSAGES_NBYTES = 4 * 2**20
"""Beyond that, for small ones."""
_GPU_BATCH_NBYTES = 32 * 2**20
"""Copied as fast as a CPU computes 8 MiB."""


class Engine:
    """All that a request passes on its way: admission, memory, queue, workers.

    Attributes:
        device_remark: Why some or all GPUs are not used, where the settings name no device; empty otherwise.
        max_message_nbytes: The largest message that the server receives whole.
        max_wait_s: The setting.
        load: Measures how loaded the server is.
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
        self.batcher = Batcher(
            config.max_batch_jobs, _batch_nbytes(config, names), config.max_batch_delay_s, split=split
        )
        self.pool = WorkerPool(config, names, self.arena, self.batcher, on_change)
        self.load = LoadMeter(self.batcher.counts, self.admission, lambda: self.pool.slots)
        self.regions = Regions(config.shared_bytes, self.pool.map, self._unmap)
        self.max_message_nbytes = config.max_message_bytes
        nbytes = max(self.arena.nbytes // _MESSAGES_FRACTION, self.max_message_nbytes)
        self._messages = Arena(nbytes, _SMALL_MESSAGES_NBYTES)
        knows_clients = config.token_file is not None or config.tls_client_ca is not None
        memories = (self.arena, self._messages)
        self.transfers = TransferWatchdog(config.transfer_timeout_s, memories, limits_clients=knows_clients)
        copier = self.pool if self.pool.has_gpus else None
        self.sent_ahead = SentAhead(self.arena, self.regions, copier, self.admission, self.transfers)
        self.observer = observer or Observer()
        self._trimmer = MemoryTrimmer(
            lambda: self.admission.admitted + self._messages.used_bytes,
            lambda: self.batcher.counts.ended,
            on_idle=self._messages.give_back,
        )
        self.max_wait_s = config.max_wait_s
        kernels = FrontKernels(config.threads * config.workers if config.has_cores_for_all else config.threads)
        front_nbytes = config.front_bytes if set(names) == {"cpu"} else 0
        self.small_requests = SmallRequests(kernels, front_nbytes)
        self.shared_requests = SharedRequests(
            kernels, self.regions, front_nbytes, is_idle=lambda: not self.admission.admitted
        )

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
            UnknownTicketError: It names a tensor that is not here.
            ArenaTooSmallError: The request is larger than the arena.
            TimeoutError: No memory became free in time.
            CancelledError: The client cancelled the call.
        """
        self.sent_ahead.tensors.limit(rpc.client, self.admission.room(rpc.client) - request.new_nbytes)
        staged = StagedRequest(request, rpc, received_at, self.arena, self.regions, self.sent_ahead, self._close)
        self.admission.enter(rpc.client, request.tensors_nbytes, rpc.deadline)
        try:
            nbytes = staged.find_tensors()
            arena = self.arena
            block = self._allocate(arena, nbytes, rpc) if may_wait else arena.allocate_at_once(nbytes, rpc.client)
            if block is not None:
                staged.place(block)
                return staged
        except BaseException as error:
            self._release(staged)
            if isinstance(error, OverloadedError):
                self.sent_ahead.tensors.limit(rpc.client, 0)  # the client may be limited for what it holds
            raise
        self._release(staged)
        return None

    def computes_at_once(self, request: Request, room: float, *, in_event_loop: bool) -> bool:
        """Whether `compute_at_once` takes a request whose response must have at most ``room`` bytes."""
        if request.response_nbytes > room:
            return False
        if request.transport == "shared":
            return in_event_loop and self.shared_requests.takes(request)
        return self.small_requests.takes(request)

    def compute_at_once(
        self, request: Request, elements: Sequence[Buffer], message: Buffer, rpc: RpcContext, received_at: float
    ) -> list[bytes]:
        """Admits a request that `computes_at_once` takes, and computes it in the calling thread.

        Returns:
            What `SmallRequests.compute` returns.

        Raises:
            OverloadedError: The server is full.
            TimeoutError: The deadline has passed.
            InvalidArgumentError: See `SharedRequests.compute`.
            ComputeError: Likewise.
            MemoryError: Likewise.
        """
        decoded_at = time.monotonic()
        try:
            self.admission.pass_through(rpc.client, request.tensors_nbytes, rpc.deadline)
            if rpc.deadline is not None and decoded_at >= rpc.deadline:
                raise TimeoutError("the request was not computed in time")
            if request.transport == "shared":
                response = self.shared_requests.compute(request, message)
            else:
                response = self.small_requests.compute(request, elements, message)
        except Exception as error:
            self.observer.failed(request.op.name, request.transport, rpc, error, received_at)
            raise
        computed_at = time.monotonic()
        # Not the kernel's time alone: a worker's has its hop, and servers that compute here must not seem far faster.
        self.batcher.count_single(request.tensors_nbytes, computed_at - received_at)
        timestamps = (received_at, *(decoded_at,) * 4, computed_at, computed_at)
        self._answered(request, rpc, timestamps)
        return response

    def compute(self, staged: StagedRequest) -> None:
        """Writes the outputs of a small request; has a worker write those of any other, and waits for it.

        Raises:
            TimeoutError: It took too long.
            CancelledError: The client cancelled the call, or the server is stopping.
            ComputeError: No worker could compute it.
        """
        job, request = staged.new_job(), staged.request
        if self.small_requests.takes(request):
            self.small_requests.compute_in_arena(job, self.arena.view)
            staged.check()
            self.batcher.count_single(job.nbytes, job.ended_at - job.started_at)
        else:
            run(self.batcher, job)
            staged.check()

    def submit(self, staged: StagedRequest, on_end: Callable[[], None]) -> None:
        """Has a worker write the outputs, and does not wait; see `bngrad_server.scheduling.batcher.Batcher.submit`.

        `StagedRequest.check` tells the outcome.

        Raises:
            CancelledError: The server is stopping.
        """
        self.batcher.submit(staged.new_job(on_end))

    def receive(
        self, source: MessageSource, nbytes: int, rpc: RpcContext, read: Callable[[MessageSource, memoryview], None]
    ) -> ReceivedMessage:
        """Receives a message once there is room for it; call `ReceivedMessage.release` in the end.

        Args:
            source: Gives the message.
            nbytes: Its size.
            rpc: The call that it comes with.
            read: Reads it from a source into memory of its size.

        Raises:
            OverloadedError: There is no room, or the client sends too slowly.
            TimeoutError: The deadline has passed.
            CancelledError: The client cancelled the call.
        """
        with self.admission.receiving(rpc.client, nbytes, rpc.deadline):
            block = self._allocate(self._messages, nbytes, rpc)
            data = self._messages.view[block.offset : block.offset + nbytes]
            message = ReceivedMessage(data, partial(self._messages.free, block))
            try:
                with self.transfers.upload(nbytes, rpc, self._messages, block):
                    read(self._messages.source_for(data, source), data)
            except BaseException:
                message.release()
                raise
            return message

    @contextmanager
    def upload(self, staged: StagedRequest) -> Iterator[None]:
        """Limits the time in which a client sends the large inputs of a staged request."""
        with self.transfers.upload(staged.sent_nbytes, staged.rpc, self.arena, staged.block), self.admission.transfer():
            yield

    @contextmanager
    def download(self, staged: StagedRequest) -> Iterator[None]:
        """Limits the time in which a client receives the response of a staged request."""
        nbytes = staged.block.nbytes - staged.sent_nbytes
        with self.transfers.download(nbytes, staged.rpc, self.arena, staged.block), self.admission.transfer():
            yield

    def close(self) -> None:
        """Ends the workers and closes the arena."""
        self.batcher.close()
        self.pool.close()
        self.transfers.close()
        self._trimmer.close()
        self.arena.close()
        self._messages.close()

    def _unmap(self, region: Region) -> None:
        self.sent_ahead.places.end_region(region)
        self.shared_requests.forget(region)
        self.pool.unmap(region)

    def _allocate(self, memory: Allocator, nbytes: int, rpc: RpcContext) -> Block:
        """Takes a block of memory, and waits for it; see `stage`."""
        deadline = time.monotonic() + self.max_wait_s
        make_room = self.sent_ahead.tensors.evict if memory is self.arena else _no_room
        if rpc.deadline is not None and rpc.deadline <= deadline:
            return memory.allocate(nbytes, rpc.client, rpc.deadline, rpc.is_cancelled, make_room)
        try:
            return memory.allocate(nbytes, rpc.client, deadline, rpc.is_cancelled, make_room)
        except TimeoutError as error:
            raise OverloadedError(str(error), self.max_wait_s) from error

    def _close(self, staged: StagedRequest, error: BaseException | None) -> None:
        """Releases a staged request, and has the observer count it."""
        self._release(staged)
        self._count(staged, error)

    def _count(self, staged: StagedRequest, error: BaseException | None) -> None:
        request, rpc, job = staged.request, staged.rpc, staged.job
        if error is not None or not staged.is_computed or job is None:
            reason = error or CancelledError()
            self.observer.failed(request.op.name, request.transport, rpc, reason, staged.received_at)
            return
        staged_at = (staged.received_at, staged.decoded_at, staged.placed_at)
        timestamps = (*staged_at, job.arrival, job.started_at, job.ended_at, time.monotonic())
        self._answered(request, rpc, timestamps)

    def _answered(self, request: Request, rpc: RpcContext, timestamps: Timestamps) -> None:
        self.observer.metrics.answered(request.series, request.tensors_nbytes, timestamps)
        if self.observer.tracing is not None:
            self.observer.tracing.answered(request, rpc, timestamps)

    def _release(self, staged: StagedRequest) -> None:
        """Ends the admission of a request, and releases its memory."""
        self._release_memory(staged)
        self._leave(staged)

    def _release_memory(self, staged: StagedRequest) -> None:
        """Releases the memory of a request once no worker touches it."""
        if staged.job is None:
            staged.release()
        else:
            self.batcher.when_untouched(staged.job, staged.release)

    def _leave(self, staged: StagedRequest) -> None:
        self.admission.leave(staged.rpc.client, staged.request.tensors_nbytes, computed=staged.is_computed)


def _no_room() -> bool:
    return False


def _arena_nbytes(config: ServerConfig, devices: Sequence[str]) -> int:
    """The arena's size; unless the settings name it, half of what a GPU's worker may page-lock: clients share more."""
    if "arena_bytes" in config.model_fields_set or "cpu" in devices:
        return config.arena_bytes
    return min(config.arena_bytes, config.pinned_bytes // 2) or config.arena_bytes


def _batch_nbytes(config: ServerConfig, devices: Sequence[str]) -> int:
    """The size of a batch; unless the settings name it, a GPU's takes as long as a CPU's."""
    is_default = "max_batch_bytes" not in config.model_fields_set and "cpu" not in devices
    return _GPU_BATCH_NBYTES if is_default else config.max_batch_bytes
