"""Computes small requests of a CPU in the front process, in the thread in which they have arrived.

The kernel takes microseconds for these, and a hop to a worker and back takes far longer, as does all that leads there:
staging, a job, a batch. A request is computed here if it is small, is laid out like an earlier one, and its kernel is
in the cache of compiled code, since nothing is compiled here. All others go to workers.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bngrad_server.codec.exchange import CHUNK
from bngrad_server.codec.request import Request
from bngrad_server.errors import ComputeError
from bngrad_server.memory.layout import ALIGNMENT, ARENA, Place, Task
from bngrad_server.scheduling.job import Job, JobState
from bngrad_server.workers.ipc import pack_task, unpack_problem
from bngrad_wire import messages
from bngrad_wire.messages import Buffer

if TYPE_CHECKING:
    from bngrad_kernels.cpu.backend import CpuBackend

logger = logging.getLogger(__name__)

_MAX_PREPARED = 64
_LOAD_INTERVAL_S = 1.0


class SmallRequests:
    """Computes requests, for any thread.

    Attributes:
        max_nbytes: The size of the largest requests that it computes; 0 if it computes none.
    """

    def __init__(self, max_nbytes: int) -> None:
        """Loads no kernel yet; requests are small whose tensors have at most ``max_nbytes``, 0 for none."""
        self.max_nbytes = max_nbytes
        self._backend: CpuBackend | None = None
        self._loaded: set[tuple[Any, int]] = set()
        self._load_at = 0.0
        self._mutex = threading.Lock()
        self._workplaces: list[_Workplace] = []  # those that no thread uses

    def takes(self, request: Request) -> bool:
        """Whether it can compute a request; if only its kernel is missing, a thread looks for that."""
        sizes = request.sizes
        if request.tensors_nbytes > self.max_nbytes or not sizes.tensor or request.transport == "shared":
            return False
        if request.new_nbytes < request.tensors_nbytes:  # some were sent ahead
            return False
        if sizes.all_stats + request.tensor_count * sizes.tensor_stride > 2 * self.max_nbytes:
            return False
        if (request.spec.dtype, request.spec.order) in self._loaded:
            return True
        self._load(request)
        return False

    def compute(self, request: Request, elements: Sequence[Buffer], message: Buffer) -> list[bytes]:
        """Computes a request that it `takes`.

        Args:
            request: The request.
            elements: The elements of the large inputs, in the op's order, if they came apart; else nothing.
            message: Its message.

        Returns:
            The response: one message, and for elements that came apart one with a chunk for each large output.
        """
        try:
            workplace = self._workplaces.pop()
        except IndexError:
            assert self._backend is not None
            workplace = _Workplace(self._backend, 2 * self.max_nbytes)
        try:
            return workplace.compute(request, elements, message)
        finally:
            self._workplaces.append(workplace)

    def compute_in_arena(self, job: Job, arena: memoryview) -> None:
        """Computes a job whose request it `takes`, unless that waits no longer, and ends it."""
        assert self._backend is not None
        job.started_at = time.monotonic()
        job.error = job.reason_to_give_up()
        if job.error is None:
            try:
                packed = pack_task(job.task, 0, range(job.spec.channels))
                self._backend.run([unpack_problem(packed, {0: job.spec}, {ARENA: arena})])
            except Exception as error:
                logger.exception("%s failed", job.spec)
                job.error = ComputeError(type(error).__name__)
        job.state = JobState.ENDED
        job.ended_at = time.monotonic()

    def _load(self, request: Request) -> None:
        """Has a thread load the kernel of a request, but not again and again while no worker has compiled it."""
        now = time.monotonic()
        with self._mutex:
            if now < self._load_at:
                return
            self._load_at = now + _LOAD_INTERVAL_S
        kernel = request.spec.dtype, request.spec.order
        threading.Thread(target=self._load_now, args=kernel, name="load-kernel", daemon=True).start()

    def _load_now(self, dtype: np.dtype[Any], order: int) -> None:
        from bngrad_kernels.cpu.backend import CpuBackend  # noqa: PLC0415 - a server of GPUs does not need LLVM

        try:
            self._backend = backend = self._backend or CpuBackend(threads=1)
            if backend.load_compiled(dtype, order):
                self._loaded.add((dtype, order))
        except Exception:
            logger.exception("a kernel cannot be loaded here; workers compute all requests for it")


class _Workplace:
    """Memory for one request at a time, laid out like its block of the arena would be."""

    def __init__(self, backend: CpuBackend, nbytes: int) -> None:
        self._backend = backend
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self._view = memory[start : start + nbytes].data
        self._prepared: dict[int, _Prepared] = {}

    def compute(self, request: Request, elements: Sequence[Buffer], message: Buffer) -> list[bytes]:
        prepared = self._prepared.get(id(request))
        if prepared is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            prepared = self._prepared[id(request)] = _Prepared(request, self._backend, self._view)
        view = memoryview(message)
        for target, source in prepared.inputs:
            target[:] = view[source]
        for target, data in zip(prepared.apart, elements, strict=False):
            target[:] = data
        prepared.run()
        return [b"".join(pieces) for pieces in prepared.response]


class _Prepared:
    """A request's tensors at their places.

    Attributes:
        request: The request, kept so that no other one has its id.
        inputs: Where inputs go, and where they are in the message.
        apart: Where the large inputs go, if they come apart.
        run: Computes it.
        response: The response's messages, in pieces.
    """

    def __init__(self, request: Request, backend: CpuBackend, view: memoryview) -> None:
        spec, sizes = request.spec, request.sizes
        offsets = [sizes.all_stats + i * sizes.tensor_stride for i in range(request.tensor_count)]
        large = [view[offset : offset + sizes.tensor] for offset in offsets]
        stats = [view[offset : offset + sizes.stats] for offset in range(0, sizes.all_stats, sizes.stats_stride or 1)]
        task = Task(None not in request.small_inputs, 0, tuple(Place(ARENA, offset) for offset in offsets))
        packed = pack_task(task, 0, range(spec.channels))
        first_output = len(request.large_inputs)
        self.request = request
        self.run: Callable[[], None] = backend.bound(unpack_problem(packed, {0: spec}, {ARENA: view}))
        sources = *zip(large, request.large_inputs, strict=False), *zip(stats, request.small_inputs, strict=False)
        self.inputs = [(target, source) for target, source in sources if isinstance(source, slice)]
        self.apart = large[:first_output] if request.chunked else []
        outputs: list[Buffer] = [b"" if request.chunked else output for output in large[first_output:]]
        outputs += stats[len(request.small_inputs) :]
        *prefixes, tail = request.response
        pieces = [*itertools.chain.from_iterable(zip(prefixes, outputs, strict=True)), tail]
        if request.chunked:
            pieces.insert(0, messages.field_prefix(request.op.exchange_number, sum(map(len, pieces))))
        self.response: list[list[Buffer]] = [pieces]
        if request.chunked:
            prefix = messages.field_prefix(CHUNK, sizes.tensor)
            self.response += [[prefix, output] for output in large[first_output:]]
