"""A request that is computed again and again at the same places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bngrad_kernels.problem import AnyProblem
from bngrad_server.codec.exchange import CHUNK
from bngrad_server.codec.request import Request
from bngrad_server.memory.layout import ALIGNMENT, ARENA, Place, Task
from bngrad_server.workers.ipc import pack_task, unpack_problem
from bngrad_wire import messages
from bngrad_wire.fields import Buffer

_SHARED = memoryview(b"")
"""Stands for a tensor that its client reads and writes itself."""


class Prepared:
    """A request's tensors at their places.

    Attributes:
        request: The request, kept so that no other one has its id.
        problem: What to compute.
    """

    def __init__(self, request: Request, places: Sequence[Place], memories: Mapping[int, memoryview]) -> None:
        """Prepares a request.

        Args:
            request: The request.
            places: Where its tensors of the shape of x are: inputs, then outputs.
            memories: The memory that they name; that with the number of the arena begins with the 1-D tensors.
        """
        spec, sizes, own = request.spec, request.sizes, memories[ARENA]
        task = Task(None not in request.small_inputs, 0, tuple(places))
        large = [
            own[place.offset : place.offset + sizes.tensor] if place.memory == ARENA else _SHARED for place in places
        ]
        stats = [own[offset : offset + sizes.stats] for offset in range(0, sizes.all_stats, sizes.stats_stride)]
        sources = *zip(large, request.large_inputs, strict=False), *zip(stats, request.small_inputs, strict=False)
        first_output = len(request.large_inputs)
        self.request = request
        self.problem: AnyProblem = unpack_problem(pack_task(task, 0, range(spec.channels)), {0: spec}, memories)
        self._inputs = [(target, source) for target, source in sources if isinstance(source, slice)]
        self._apart = large[:first_output] if request.chunked else []
        self._response = _response(request, large[first_output:], stats[len(request.small_inputs) :])

    def copy_in(self, message: Buffer, elements: Sequence[Buffer] = ()) -> None:
        """Copies the inputs that are in the message, and the large ones that came apart."""
        view = memoryview(message)
        for target, source in self._inputs:
            target[:] = view[source]
        for target, data in zip(self._apart, elements, strict=False):
            target[:] = data

    def response(self) -> list[bytes]:
        """Returns the messages of the response, once the outputs are there: see `SmallRequests.compute`."""
        return [b"".join(pieces) for pieces in self._response]


def aligned_memory(nbytes: int) -> memoryview:
    """Returns new memory that is aligned as the arena's blocks are."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].data


def _response(request: Request, large: Sequence[Buffer], small: Sequence[Buffer]) -> list[list[Buffer]]:
    """The messages of a response, in pieces that are views of the outputs."""
    outputs = [*([b""] * len(large) if request.chunked else large), *small]
    pieces = request.response_pieces(outputs)
    if not request.chunked:
        return [pieces]
    prefix = messages.field_prefix(CHUNK, request.sizes.tensor)
    return [request.exchange_pieces(pieces), *([prefix, output] for output in large)]
