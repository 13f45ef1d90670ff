"""The choice of the way that a call takes to the server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np

from bngrad import _validation
from bngrad._cancellation import Cancellation
from bngrad._credentials import Access
from bngrad._deadline import Deadline
from bngrad._errors import (
    BngradError,
    InvalidArgumentError,
    NotSharedError,
    UnavailableError,
    from_status,
)
from bngrad._requests import codec, request
from bngrad._requests.request import Call
from bngrad._results import Array, ServerInfo
from bngrad._shared_memory.farewell import Farewell
from bngrad._shared_memory.lease import LeaseEndedError, LeaseError, LeaseLateError, UnreachableError
from bngrad._shared_memory.pool import Pool, Region
from bngrad._shared_memory.quarantine import Doubts
from bngrad._transports.endpoints import Discovery, Ways
from bngrad._transports.grpcio import GrpcEndpoint
from bngrad._transports.http2 import DirectEndpoint, NotConnectedError
from bngrad._validation import Transport
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.messages import Buffer

Result = TypeVar("Result")

_SHARED_FROM_NBYTES = 64 * 1024
"""Smaller tensors are sent: that costs less than saying where they are."""
_NOT_LOCAL = "it is not on this host, or shares none"


class Connector:
    """Makes calls to one server, from any number of threads.

    Attributes:
        has_answered: Whether the server has said where it can be reached.
    """

    def __init__(
        self,
        target: str,
        transport: Transport,
        options: Iterable[_validation.ChannelOption],
        doubts: Doubts,
        access: Access,
    ) -> None:
        """Connects to nothing yet.

        Args:
            target: The server's address.
            transport: Which way calls go; "auto" for the fastest that there is.
            options: gRPC channel arguments.
            doubts: What earlier calls left in doubt, at this server or another one.
            access: How it is reached.
        """
        self.has_answered = False
        self._target = target
        self._transport = transport
        self._channel = access.channel(_validation.channel_options(options))
        self._grpc = GrpcEndpoint(self._channel, target, access)
        self._results = Pool(None)
        self._doubts = doubts
        self._discovery = Discovery(target, access)

    def run(self, call: Call[Result], deadline: Deadline, cancellation: Cancellation) -> Result:
        """Makes a call, once.

        Args:
            call: The call.
            deadline: When to give up.
            cancellation: Where to hear that the caller has lost interest.

        Raises:
            BngradError: See `bngrad.Client`.
        """
        self._settle(call, deadline, cancellation)
        if self._transport == "unary":
            return self._send(call, self._grpc, deadline, cancellation)
        ways = self._discovery.ways(self._ask_endpoints, deadline, cancellation)
        if self._prefers_shared(call, ways):
            try:
                return self._share(call, ways, deadline, cancellation)
            except (LeaseError, NotConnectedError) as error:
                self._lose_with(ways, error, cancellation)
                is_late = isinstance(error, LeaseLateError)
                if is_late or cancellation.cancelled or self._transport == "shared":
                    raise self._not_shared(error, deadline) from error
            self._settle(call, deadline, cancellation)
        # Who asks for a stream to a TCP address means that, also where there is a shorter way.
        by_tcp_first = self._transport == "stream" and ways.remote is not None
        for endpoint in (ways.remote, ways.local) if by_tcp_first else (ways.local, ways.remote):
            if endpoint is not None:
                try:
                    return self._send(call, endpoint, deadline, cancellation)
                except NotConnectedError as error:
                    if cancellation.cancelled:
                        raise UnavailableError(f"the call to {self._target} was cancelled") from error
                    self._discovery.lose(ways, endpoint)
        return self._send(call, self._grpc, deadline, cancellation)

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        """Asks the server what it is."""
        return self._ask(deadline, cancellation)[0]

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], deadline: Deadline, cancellation: Cancellation
    ) -> Array:
        """A new array in memory shared with the server.

        Raises:
            NotSharedError: There is no such memory.
        """
        if self._transport in ("unary", "stream"):
            raise self._not_shared(LeaseError("it goes another way"), deadline)
        ways = self._discovery.ways(self._ask_endpoints, deadline, cancellation)
        try:
            if ways.shared is None:
                raise self._no_memory(ways)
            return ways.shared.empty(shape, dtype, deadline, cancellation)
        except LeaseError as error:
            self._lose_with(ways, error, cancellation)
            raise self._not_shared(error, deadline) from error

    def close(self) -> None:
        """Gives the connections up, and ends the calls that go by grpcio; closing again does nothing."""
        self._channel.close()
        self._discovery.close()
        self._results.close()

    def _settle(self, call: Call[Result], deadline: Deadline, cancellation: Cancellation) -> None:
        """Waits until no earlier attempt, nor another call that failed, can write to the arrays of a call."""
        if not self._doubts.wait(call.arrays, deadline, cancellation):
            reason = "a call that failed may still write to an array of this call"
            raise from_status(grpc.StatusCode.DEADLINE_EXCEEDED, reason, b"", self._target, deadline.timeout)

    def _send(
        self,
        call: Call[Result],
        endpoint: DirectEndpoint | GrpcEndpoint,
        deadline: Deadline,
        cancellation: Cancellation,
    ) -> Result:
        """Sends the tensors to an endpoint."""
        op = call.op
        is_small = call.nbytes < endpoint.unary_below_nbytes
        if self._transport == "unary" or (self._transport == "auto" and is_small):
            return call.read(endpoint.unary(op.method, call.pieces(), deadline, cancellation), call.out)
        results = [
            self._results.empty(call.shape, call.dtype) if out is None or not out.flags.c_contiguous else out
            for out in call.out
        ]
        tensors = [codec.view_of(array) for array in call.large.values()]
        response = endpoint.exchange(
            request.EXCHANGE_METHOD,
            op.number,
            call.header_pieces(),
            tensors,
            [codec.view_of(result) for result in results],
            deadline,
            cancellation,
        )
        return call.read(response, _delivered(results, call.out), apart=True)

    def _share(self, call: Call[Result], ways: Ways, deadline: Deadline, cancellation: Cancellation) -> Result:
        try:
            return self._share_once(call, ways, deadline, cancellation)
        except LeaseEndedError:  # the server's doing, or another call's that came to nothing
            return self._share_once(call, ways, deadline, cancellation)

    def _share_once(self, call: Call[Result], ways: Ways, deadline: Deadline, cancellation: Cancellation) -> Result:
        """Puts the tensors into shared memory, where they are not there already, and says where they are."""
        pool, endpoint, op = ways.shared, ways.local, call.op
        if pool is None or endpoint is None:
            raise self._no_memory(ways)
        limits = deadline, cancellation
        arrays = [_in_pool(pool, array, *limits) for array in call.large.values()]
        results = [
            pool.empty(call.shape, call.dtype, *limits)
            if out is None or not out.flags.c_contiguous or pool.locate(out) is None
            else out
            for out in call.out
        ]
        pieces: list[Buffer] = [
            codec.located_piece(op.fields[field], array.dtype, array.shape, *_place(pool, array))
            for field, array in zip(call.large, arrays, strict=True)
        ]
        for number, result in zip(op.location_numbers, results, strict=True):
            pieces.append(codec.location_piece(number, *_place(pool, result)))
        pieces += call.small_pieces()
        regions, farewell = _hold(pool, results), Farewell()
        try:
            response = endpoint.unary(op.method, pieces, deadline, cancellation, farewell)
        except InvalidArgumentError as error:
            farewell.close()
            _let_go(regions)
            pool.check()
            if any(pool.locate(array) is None for array in (*arrays, *results)):
                raise LeaseEndedError("a lease has ended") from error
            raise
        except BaseException as error:
            for result, region in zip(results, regions, strict=True):
                self._doubts.add(result, region, farewell)  # A worker may write the answer yet.
            if isinstance(error, NotConnectedError) and not cancellation.cancelled:
                self._discovery.lose(ways, endpoint)
            raise
        farewell.close()  # where the server is stopping, the connection ended with the call
        _let_go(regions)
        return call.read(response, _delivered(results, call.out), apart=True)

    def _prefers_shared(self, call: Call[Result], ways: Ways) -> bool:
        if self._transport == "auto":
            return ways.shared is not None and call.nbytes >= _SHARED_FROM_NBYTES
        return self._transport == "shared"

    def _no_memory(self, ways: Ways) -> LeaseError:
        """Why there is no shared memory; who insists on it may wait for a server that is there but in trouble."""
        if self._transport == "shared" and ways.is_here:
            return UnreachableError("its endpoint on this host does not answer")
        return LeaseError(_NOT_LOCAL)

    def _not_shared(self, error: Exception, deadline: Deadline) -> BngradError:
        if isinstance(error, LeaseLateError):
            return from_status(grpc.StatusCode.DEADLINE_EXCEEDED, str(error), b"", self._target, deadline.timeout)
        has_gone = isinstance(error, NotConnectedError | UnreachableError | LeaseEndedError)
        kind = UnavailableError if has_gone else NotSharedError
        return kind(f"{self._target} shares no memory with this client: {error}")

    def _ask(self, deadline: Deadline, cancellation: Cancellation) -> tuple[ServerInfo, pb.Endpoints]:
        answer = self._grpc.unary(request.SERVER_INFO_METHOD, [], deadline, cancellation)
        self.has_answered = True
        return codec.read_server_info(answer)

    def _ask_endpoints(self, deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        return self._ask(deadline, cancellation)[1]

    def _lose_with(self, ways: Ways, error: Exception, cancellation: Cancellation) -> None:
        """Gives the server on this host up where the error says that it has gone, and no cancellation brought it."""
        if isinstance(error, UnreachableError) and ways.local is not None and not cancellation.cancelled:
            self._discovery.lose(ways, ways.local)


def _in_pool(pool: Pool, array: Array, deadline: Deadline, cancellation: Cancellation) -> Array:
    """The array, or a copy of it in the pool's memory."""
    if pool.locate(array) is not None:
        return array
    copy = pool.empty(array.shape, array.dtype, deadline, cancellation)
    np.copyto(copy, array)
    return copy


def _place(pool: Pool, array: Array) -> tuple[bytes, int]:
    place = pool.locate(array)
    if place is None:
        raise LeaseEndedError("a lease has ended")
    return place


def _hold(pool: Pool, results: Sequence[Array]) -> list[Region]:
    """The regions of the results, whose leases then last until `_let_go`."""
    regions: list[Region] = []
    for result in results:
        region = pool.hold(result)
        if region is None:
            _let_go(regions)
            raise LeaseEndedError("a lease has ended")
        regions.append(region)
    return regions


def _let_go(regions: Sequence[Region]) -> None:
    for region in regions:
        region.close()


def _delivered(results: Sequence[Array], outs: Sequence[Array | None]) -> list[Array]:
    """The results, where the caller wants them."""
    delivered = []
    for result, out in zip(results, outs, strict=True):
        if out is not None and out is not result:
            np.copyto(out, result)
        delivered.append(result if out is None else out)
    return delivered
