"""Computes small requests.

The kernel takes microseconds for these, and a hop to a worker and back takes far longer, as does all that leads there:
staging, a job, a batch. A request is computed here if it is small, is laid out like an earlier one, and its kernel is
loaded. All others go to workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bngrad_server.codec.request import Request
from bngrad_server.front.kernels import FrontKernels, failed
from bngrad_server.front.prepared import Prepared, aligned_memory
from bngrad_server.memory.layout import ARENA, Place
from bngrad_server.scheduling.job import Job, JobState
from bngrad_server.workers.ipc import pack_task, unpack_problem
from bngrad_wire.fields import Buffer

_MAX_PREPARED = 64
_MAX_SPARE = 4
"""How many workplaces are kept that no thread uses."""


class SmallRequests:
    """Computes requests, for any thread.

    Attributes:
        max_nbytes: The size of the largest requests that it computes; 0 if it computes none.
    """

    def __init__(self, kernels: FrontKernels, max_nbytes: int) -> None:
        """Requests are small whose tensors have at most ``max_nbytes``, 0 for none."""
        self.max_nbytes = max_nbytes
        self._kernels = kernels
        self._workplaces: list[_Workplace] = []  # those that no thread uses

    def takes(self, request: Request) -> bool:
        """Whether it can compute a request."""
        sizes = request.sizes
        if request.tensors_nbytes > self.max_nbytes or not sizes.tensor or request.transport == "shared":
            return False
        if request.new_nbytes < request.tensors_nbytes:  # some were sent ahead
            return False
        if sizes.all_stats + request.tensor_count * sizes.tensor_stride > 2 * self.max_nbytes:
            return False
        return self._kernels.has(request.spec)

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
            workplace = _Workplace(self._kernels, 2 * self.max_nbytes)
        try:
            return workplace.compute(request, elements, message)
        finally:
            if len(self._workplaces) < _MAX_SPARE:
                self._workplaces.append(workplace)

    def compute_in_arena(self, job: Job, arena: memoryview) -> None:
        """Computes a job that `takes` accepts, unless its request was given up, and ends it."""
        job.started_at = time.monotonic()
        job.error = job.reason_to_give_up()
        if job.error is None:
            try:
                packed = pack_task(job.task, 0, range(job.spec.channels))
                self._kernels.backend.run([unpack_problem(packed, {0: job.spec}, {ARENA: arena})])
            except Exception as error:
                job.error = failed(job.spec, error)
        job.state = JobState.ENDED
        job.ended_at = time.monotonic()


class _Workplace:
    """Memory for one request at a time, laid out like its block of the arena would be."""

    def __init__(self, kernels: FrontKernels, nbytes: int) -> None:
        self._kernels = kernels
        self._view = aligned_memory(nbytes)
        self._prepared: dict[int, tuple[Prepared, Callable[[], None]]] = {}

    def compute(self, request: Request, elements: Sequence[Buffer], message: Buffer) -> list[bytes]:
        prepared, run = self._prepared.get(id(request)) or self._prepare(request)
        prepared.copy_in(message, elements)
        try:
            run()
        except Exception as error:
            raise failed(request.spec, error) from error
        return prepared.response()

    def _prepare(self, request: Request) -> tuple[Prepared, Callable[[], None]]:
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        sizes = request.sizes
        offsets = (sizes.all_stats + i * sizes.tensor_stride for i in range(request.tensor_count))
        prepared = Prepared(request, [Place(ARENA, offset) for offset in offsets], {ARENA: self._view})
        known = self._prepared[id(request)] = prepared, self._kernels.bound(prepared.problem)
        return known
