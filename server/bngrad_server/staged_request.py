"""A request in shared memory: where its tensors lie, and the job that computes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.request import Request
from bngrad_server.memory.ahead import AheadTensor
from bngrad_server.memory.allocator import Block
from bngrad_server.memory.arena import Arena
from bngrad_server.memory.layout import ARENA, Place, Task
from bngrad_server.memory.regions import Region, Regions
from bngrad_server.rpc_context import RpcContext
from bngrad_server.scheduling.job import Job
from bngrad_server.sent_ahead import SentAhead
from bngrad_wire.chunks import copy
from bngrad_wire.fields import Buffer


class StagedRequest:
    """A request's place in shared memory, until `close` or the end of a ``with`` block.

    `bngrad_server.engine.Engine.stage` makes it and `place`s it.

    Attributes:
        request: The request.
        rpc: The call that it came with.
        received_at: When its message had arrived, on the monotonic clock.
        decoded_at: When it was decoded.
        placed_at: When it had its memory.
        large_inputs: The memory of the inputs of the shape of x, to be filled, as the op lists them; None for each that
            the client has put into a region, or sent ahead.
        large_outputs: The memory of the outputs of the shape of x, to be read; None where the client reads it itself.
        block: Its memory, once it is placed.
        job: The job that computes it, once there is one.
        is_computed: Whether the outputs are there.
    """

    large_inputs: list[memoryview | None]
    large_outputs: list[memoryview | None]
    block: Block

    def __init__(
        self,
        request: Request,
        rpc: RpcContext,
        received_at: float,
        arena: Arena,
        regions: Regions,
        sent_ahead: SentAhead,
        on_close: Callable[[StagedRequest, BaseException | None], None],
    ) -> None:
        self.request = request
        self.rpc = rpc
        self.received_at = received_at
        self.decoded_at = self.placed_at = time.monotonic()
        self.job: Job | None = None
        self.is_computed = False
        self._arena = arena
        self._regions = regions
        self._sent_ahead = sent_ahead
        self._on_close = on_close
        self._is_placed = False
        self._held: list[Region] = []
        self._ahead_count = 0
        self._held_ahead: list[AheadTensor] = []

    def find_tensors(self) -> int:
        """Finds the tensors that are here already, and returns how many bytes of the arena the others need.

        Those in regions are held from now on, those sent ahead once there is memory for the others: requests that hold
        some and wait for more could wait for each other.

        Raises:
            InvalidArgumentError: The request names a place that does not exist, or tensors overlap.
            UnknownTicketError: It names a tensor that is not here.
        """
        request = self.request
        places: list[Place | None] = []
        fields = request.op.large_inputs + request.op.locations
        for field, source in zip(fields, request.large_inputs + request.locations, strict=True):
            if isinstance(source, pb.Location):
                region, place = self._regions.hold(field, source, request.sizes.tensor)
                self._held.append(region)
                places.append(place)
                continue
            places.append(None)
            if isinstance(source, bytes):
                self._sent_ahead.tensors.check(field, source, self.rpc.client, request.spec.dtype, request.spec.shape)
                self._ahead_count += 1
        if self._held:
            check_overlap(request, places)
        for i, ticket in enumerate(request.tickets):
            if ticket and (found := places[i]) is not None:
                places[i] = self._sent_ahead.places.copied(found, request.sizes.tensor, ticket, self.rpc.client)
        self._places = places
        return request.sizes.all_stats + (places.count(None) - self._ahead_count) * request.sizes.tensor_stride

    def place(self, block: Block) -> None:
        """Lays the tensors out that are not here yet, in a block of the size that `find_tensors` returned.

        Raises:
            UnknownTicketError: A tensor that was sent ahead has been evicted meanwhile.
        """
        sizes, self.block, self._is_placed = self.request.sizes, block, True
        self._stats_offset = block.offset
        offset = block.offset + sizes.all_stats
        arena = self._arena.view
        if self._ahead_count:
            self._hold_ahead()
        views: list[memoryview | None] = []
        places = []
        for place in self._places:
            if place is None:
                views.append(arena[offset : offset + sizes.tensor])
                places.append(Place(ARENA, offset))
                offset += sizes.tensor_stride
            else:
                views.append(None)
                places.append(place)
        inputs = len(self.request.large_inputs)
        self.large_inputs, self.large_outputs = views[:inputs], views[inputs:]
        self._task = Task(None not in self.request.small_inputs, self._stats_offset, tuple(places))
        self.placed_at = time.monotonic()

    def _hold_ahead(self) -> None:
        request = self.request
        for i, (field, source) in enumerate(zip(request.op.large_inputs, request.large_inputs, strict=True)):
            if isinstance(source, bytes):
                tensor = self._sent_ahead.tensors.hold(
                    field, source, self.rpc.client, request.spec.dtype, request.spec.shape
                )
                self._held_ahead.append(tensor)
                self._places[i] = Place(ARENA, tensor.block.offset, tensor.number)

    def __enter__(self) -> StagedRequest:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Has the engine release the memory once no worker touches it, and count the request; tells it the error."""
        self._on_close(self, error)

    def release(self) -> None:
        """Releases the memory."""
        if self._is_placed:
            self._arena.free(self.block)
        for region in self._held:
            self._regions.release(region)
        for tensor in self._held_ahead:
            self._sent_ahead.tensors.release(tensor)

    def copy_from(self, message: Buffer, chunks: Sequence[Buffer] = ()) -> None:
        """Copies the tensors that the message and whole chunks hold: the one copy of a request's elements."""
        data = memoryview(message)
        if chunks:
            inputs = (self.large_inputs[i] for i in self.request.chunk_order)
            for view, chunk in zip((view for view in inputs if view is not None), chunks, strict=True):
                copy(view, chunk)
        for source, target in zip(self.request.large_inputs, self.large_inputs, strict=True):
            if isinstance(source, slice) and target is not None:
                self._arena.ask_for_huge_pages(target)
                copy(target, data[source])
        for i, source in enumerate(self.request.small_inputs):
            if source is not None:
                self._stats(i)[:] = data[source]

    def new_job(self, on_end: Callable[[], None] | None = None) -> Job:
        """Makes the job that computes the request."""
        request, rpc = self.request, self.rpc
        for output in self.large_outputs:
            if output is not None:
                self._arena.ask_for_huge_pages(output)
        self.job = Job(
            request.spec,
            self._task,
            request.tensors_nbytes,
            request.kernel_key,
            client=rpc.client,
            priority=request.priority,
            deadline=rpc.deadline,
            is_abandoned=rpc.is_cancelled,
            on_end=on_end,
        )
        return self.job

    @property
    def sent_nbytes(self) -> int:
        """How many bytes of the large inputs come with the request: those that are not in a region, or sent ahead."""
        return sum(len(view) for view in self.large_inputs if view is not None)

    def check(self) -> None:
        """Raises why the job, which has ended, could not be computed, if it could not."""
        assert self.job is not None
        self.job.check()
        self.is_computed = True

    def response(self) -> list[Buffer]:
        """The response, in pieces that are views of the outputs; use them before the memory is released."""
        request = self.request
        outputs: list[Buffer] = [b"" if view is None or request.chunked else view for view in self.large_outputs]
        first = len(request.small_inputs)
        outputs += [self._stats(first + i) for i in range(len(request.response) - 1 - len(outputs))]
        return request.response_pieces(outputs)

    def _stats(self, index: int) -> memoryview:
        start = self._stats_offset + index * self.request.sizes.stats_stride
        return self._arena.view[start : start + self.request.sizes.stats]


def check_overlap(request: Request, places: Sequence[Place | None]) -> None:
    """Rejects outputs over inputs or other outputs: a rerun, after a worker has died, must read the same inputs."""
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
