"""Calls whose large tensors lie in memory that is shared with the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from bngrad._ahead.tensor import places_of
from bngrad._ahead.upload import Server
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import InvalidArgumentError
from bngrad._requests import codec
from bngrad._requests.request import PreparedRequest
from bngrad._shared_memory.lease import LeaseEndedError
from bngrad._shared_memory.pool import Located, Pool
from bngrad._shared_memory.quarantine import AbandonedCall, Output, Quarantine
from bngrad._transports.http2 import Http2Transport
from bngrad_wire.fields import Buffer

Result = TypeVar("Result")


class SharedMemoryCalls(NamedTuple):
    """Makes such calls to one server.

    Attributes:
        pool: The memory that the server shares with this client.
        transport: Its Unix socket.
        quarantine: Takes the outputs of calls that failed.
        server: What tensors that were sent ahead know the server by.
    """

    pool: Pool
    transport: Http2Transport
    quarantine: Quarantine
    server: Server

    def run(self, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation) -> Result:
        """Makes a call with its tensors in shared memory; copies those there that are elsewhere.

        Raises:
            BngradError: The server's status, as an error.
            LeaseEndedError: The server no longer knows the memory; another call gets new memory.
            LeaseError: The server leases no memory.
            NotConnectedError: The server cannot be reached at its Unix socket.
        """
        # Results come first, so that they get the blocks of the last results: workers write past the caches, so copies
        # of inputs into these blocks would take twice as long.
        results = self._results(request, deadline, cancellation)
        inputs, tickets = self._inputs(request, deadline, cancellation)
        pieces = [*_locations(request, inputs, tickets, results), *request.small_pieces()]
        for result in results:
            result.region.hold()
        abandoned = AbandonedCall()
        outputs = [Output(result.array, result.region, abandoned) for result in results]
        try:
            response = self.transport.unary(request.op.method, pieces, deadline, cancellation, abandoned)
        except InvalidArgumentError as error:
            abandoned.close()
            _release(results)
            self.pool.check()
            if any(self.pool.locate(tensor.array) is None for tensor in (*inputs, *results)):
                raise LeaseEndedError("a lease has ended") from error
            raise
        except BaseException:
            self.quarantine.outputs.extend(outputs)  # A worker may still write them.
            self.quarantine.extended()
            raise
        abandoned.close()  # a stopping server ends the connection with the call
        _release(results)
        return request.read(response, request.delivered([result.array for result in results]), apart=True)

    def _results(
        self, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation
    ) -> list[Located]:
        """Returns memory for the results: what the caller has given where it is shared, else new memory."""
        return [
            (out is not None and out.flags.c_contiguous and self.pool.locate(out))
            or self.pool.new(request.shape, request.dtype, deadline, cancellation)
            for out in request.out
        ]

    def _inputs(
        self, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation
    ) -> tuple[list[Located], list[bytes]]:
        """Returns the large tensors in shared memory, where those are that were sent ahead, and the GPU's tickets."""
        found = places_of(request.ahead, request.large, self.server, deadline, cancellation)
        copies = {field: (place.copy, place.ticket) for field, (_, place) in found.items() if place.copy is not None}
        sources = [copies.get(field, (array, b"")) for field, array in request.large.items()]
        inputs = self.pool.copies([array for array, _ in sources], deadline, cancellation)
        # One whose lease has ended has been copied to another place.
        tickets = [
            ticket if located.array is array else b"" for located, (array, ticket) in zip(inputs, sources, strict=True)
        ]
        return inputs, tickets


def _locations(
    request: PreparedRequest[Result], inputs: Sequence[Located], tickets: Sequence[bytes], results: Sequence[Located]
) -> list[Buffer]:
    """Returns the pieces of the message that say where the large tensors lie."""
    pieces: list[Buffer] = []
    for field, tensor, ticket in zip(request.large, inputs, tickets, strict=True):
        number, dtype, shape = request.op.fields[field], tensor.array.dtype, tensor.array.shape
        if ticket:
            pieces.append(codec.ticket_piece(number, dtype, shape, ticket, tensor.place))
        else:
            pieces.append(codec.located_piece(number, dtype, shape, *tensor.place))
    for number, result in zip(request.op.location_numbers, results, strict=True):
        pieces.append(codec.location_piece(number, *result.place))
    return pieces


def _release(results: Sequence[Located]) -> None:
    for result in results:
        result.region.close()
