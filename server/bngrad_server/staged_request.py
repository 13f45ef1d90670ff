"""A request's stay in shared memory: its place there, its job, and what becomes of both."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.requests import Request
from bngrad_server.memory.arena import Block
from bngrad_server.memory.regions import Region
from bngrad_server.rpc_context import RpcContext
from bngrad_server.scheduling.dispatch import run
from bngrad_server.scheduling.job import Job
from bngrad_server.workers.ipc import ARENA, Place, Task
from bngrad_wire.messages import Buffer

if TYPE_CHECKING:
    from bngrad_server.engine import Engine

_COPIED_WITH_LOCK_NBYTES = 32 * 1024
"""Larger copies let other threads run meanwhile, which costs something itself."""


class StagedRequest:
    """A request's place in shared memory, until `close` or the end of a ``with`` block.

    Attributes:
        request: The request.
        large_inputs: The memory of the inputs of the shape of x, to be filled, as the op lists them; None for each that
            the client has put into shared memory itself.
        large_outputs: The memory of the outputs of the shape of x, to be read; None where the client reads it itself.
        computed: Whether the outputs are there.
        job: What the batcher knows of it, once it does.
    """

    large_inputs: list[memoryview | None]
    large_outputs: list[memoryview | None]

    def __init__(self, engine: Engine, request: Request, caller: RpcContext, received_at: float) -> None:
        self.request = request
        self.computed = False
        self._engine = engine
        self._caller = caller
        self._received_at = received_at
        self._decoded_at = self._placed_at = time.monotonic()
        self._block: Block | None = None
        self._held: list[Region] = []
        self.job: Job | None = None

    def take_memory(self, *, may_wait: bool) -> bool:
        """Finds the request's place, and says whether there is one; see `Engine.stage`."""
        request, sizes = self.request, self.request.sizes
        given = self._places_in_regions()
        nbytes = sizes.all_stats + given.count(None) * sizes.tensor_stride
        if may_wait:
            self._block = self._engine.allocate(nbytes, self._caller)
        else:
            self._block = self._engine.arena.allocate_at_once(nbytes)
        if self._block is None:
            return False
        self._stats_offset = self._block.offset
        offset = self._stats_offset + sizes.all_stats
        arena = self._engine.arena.view
        views: list[memoryview | None] = []
        places = []
        for place in given:
            if place is None:
                views.append(arena[offset : offset + sizes.tensor])
                places.append(Place(ARENA, offset))
                offset += sizes.tensor_stride
            else:
                views.append(None)
                places.append(place)
        inputs = len(request.large_inputs)
        self.large_inputs, self.large_outputs = views[:inputs], views[inputs:]
        self._task = Task(None not in request.small_inputs, self._stats_offset, tuple(places))
        self._placed_at = time.monotonic()
        return True

    def __enter__(self) -> StagedRequest:
        """Gives itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Gives all back, and has the observer know how it went.

        Args:
            error: Why there is no answer, if there is none.
        """
        self.give_back()
        observer, request, job = self._engine.observer, self.request, self.job
        if error is not None or not self.computed or job is None:
            reason = error or CancelledError()
            observer.failed(request.op.name, request.transport, self._caller, reason, self._received_at)
            return
        arrived = (self._received_at, self._decoded_at, self._placed_at)
        moments = (*arrived, job.arrival, job.started_at, job.ended_at, time.monotonic())
        observer.metrics.answered(request.series, request.tensors_nbytes, moments)
        if observer.tracing is not None:
            observer.tracing.answered(request, self._caller, moments)

    def give_back(self) -> None:
        """Lets the request out, and gives all memory back as soon as no worker touches it."""
        if self.job is None:
            self._release()
        else:
            self._engine.batcher.when_untouched(self.job, self._release)
        request = self.request
        self._engine.admission.leave(self._caller.client, request.tensors_nbytes, computed=self.computed)

    def copy_from(self, message: bytes) -> None:
        """Copies what the message holds: the one copy of a request's elements."""
        data = memoryview(message)
        for source, target in zip(self.request.large_inputs, self.large_inputs, strict=True):
            if isinstance(source, slice) and target is not None:
                copy(target, data[source])
        for i, source in enumerate(self.request.small_inputs):
            if source is not None:
                self._stats(i)[:] = data[source]

    def compute(self) -> None:
        """Has a worker write the outputs.

        Raises:
            TimeoutError: It took too long.
            CancelledError: The caller gave up, or the server is stopping.
            ComputeError: No worker could compute it.
        """
        self.job = self._new_job()
        run(self._engine.batcher, self.job)
        self.computed = True

    def submit(self, on_end: Callable[[], None]) -> None:
        """Has a worker write the outputs sooner or later; see `bngrad_server.scheduling.batcher.Batcher.submit`.

        Raises:
            CancelledError: The server is stopping.
        """
        job = self._new_job()
        job.on_end = on_end
        self._engine.batcher.submit(job)
        self.job = job

    def check(self) -> None:
        """Looks at the outcome of a job that was submitted and has ended; raises as `compute` does."""
        assert self.job is not None
        self.job.check()
        self.computed = True

    def response(self) -> list[Buffer]:
        """The response, in pieces that are views of the outputs, which must be used before the memory is given back."""
        request = self.request
        *prefixes, tail = request.response
        outputs: list[Buffer] = [b"" if view is None or request.chunked else view for view in self.large_outputs]
        first = len(request.small_inputs)
        outputs += [self._stats(first + i) for i in range(len(prefixes) - len(outputs))]
        return [*itertools.chain.from_iterable(zip(prefixes, outputs, strict=True)), tail]

    def _new_job(self) -> Job:
        request, caller = self.request, self._caller
        return Job(
            request.spec,
            self._task,
            request.tensors_nbytes,
            request.kernel_key,
            client=caller.client,
            priority=request.priority,
            deadline=caller.deadline,
            is_abandoned=caller.is_cancelled,
        )

    def _stats(self, index: int) -> memoryview:
        start = self._stats_offset + index * self.request.sizes.stats_stride
        return self._engine.arena.view[start : start + self.request.sizes.stats]

    def _places_in_regions(self) -> list[Place | None]:
        """Where the tensors of the shape of x are in shared regions; None for each that has no place yet."""
        request = self.request
        places: list[Place | None] = []
        fields = request.op.large_inputs + request.op.locations
        for field, source in zip(fields, request.large_inputs + request.locations, strict=True):
            if isinstance(source, pb.Location):
                region, place = self._engine.regions.hold(field, source, request.sizes.tensor)
                self._held.append(region)
                places.append(place)
            else:
                places.append(None)
        if self._held:
            _check_overlap(request, places)
        return places

    def _release(self) -> None:
        if self._block is not None:
            self._engine.arena.free(self._block)
        for region in self._held:
            self._engine.regions.release(region)


def _check_overlap(request: Request, places: Sequence[Place | None]) -> None:
    """Refuses outputs over inputs: a second run, after a worker has died, would read what the first one wrote.

    Alike outputs over outputs.
    """
    fields = request.op.large_inputs + request.op.locations
    for i in range(len(request.large_inputs), len(places)):
        output = places[i]
        for field, place in zip(fields[:i], places, strict=False):
            if (
                output is not None
                and place is not None
                and place.memory == output.memory
                and abs(place.offset - output.offset) < request.sizes.tensor
            ):
                raise InvalidArgumentError((FieldViolation(fields[i], f"{fields[i]} must not overlap {field}"),))


def copy(target: memoryview, source: memoryview) -> None:
    """Copies bytes; both views have the same size."""
    if target.nbytes <= _COPIED_WITH_LOCK_NBYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
