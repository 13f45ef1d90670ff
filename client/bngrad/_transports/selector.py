"""Selects the transport of each call to one server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np

from bngrad import _validation
from bngrad._ahead.tensor import places_of
from bngrad._ahead.upload import Place
from bngrad._credentials import Credentials
from bngrad._deadline import Cancellation, Deadline
from bngrad._errors import (
    BngradError,
    NotSharedError,
    UnavailableError,
    UnknownTicketError,
    from_status,
)
from bngrad._requests import codec
from bngrad._requests.request import EXCHANGE_METHOD, NO_TICKETS, SERVER_INFO_METHOD, PreparedRequest
from bngrad._results import ServerInfo
from bngrad._shared_memory.lease import (
    LeaseEndedError,
    LeaseError,
    LeaseLateError,
    LeaseRefusedError,
    UnreachableError,
)
from bngrad._shared_memory.pool import Pool
from bngrad._shared_memory.quarantine import Quarantine
from bngrad._transports.ahead import AheadConnection
from bngrad._transports.connection_pool import NoConnectionYetError, NotConnectedError
from bngrad._transports.endpoints import EndpointDiscovery, Endpoints
from bngrad._transports.grpcio import GrpcioTransport, begin_to_ask
from bngrad._transports.http2 import Http2Transport
from bngrad._transports.server_state import ServerState
from bngrad._transports.shared_memory import SharedMemoryCalls
from bngrad.typing import Array, Transport
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.load_report import LoadReport

Result = TypeVar("Result")

_SHARED_FROM_NBYTES = 64 * 1024
"""Smaller tensors are sent in the message, which is cheaper than their locations."""
_POOLED_FROM_NBYTES = 64 * 1024
"""For smaller results NumPy has memory that is not fresh either, and gives it sooner."""
_ANSWER_TIMEOUT_S = 5.0
"""After this a server that does not say whether it is alive is frozen."""
_NOT_LOCAL = "it is on another host, in another container or of another user, or shares none"


class TransportSelector:
    """Makes calls to one server, from any number of threads, each by the fastest transport that there is.

    Attributes:
        has_answered: Whether the server has ever answered a question for its endpoints.
    """

    def __init__(
        self,
        target: str,
        transport: Transport,
        options: Iterable[_validation.ChannelOption],
        quarantine: Quarantine,
        credentials: Credentials,
        may_leave: Callable[[], bool],
    ) -> None:
        """Connects to nothing yet.

        Args:
            target: The server's address.
            transport: The transport to prefer.
            options: gRPC channel arguments.
            quarantine: That of the client, so it also has outputs of other servers.
            credentials: TLS and the token.
            may_leave: Returns whether calls that the server does not answer may be made elsewhere.
        """
        self.has_answered = False
        self._target = target
        self._preference = transport
        self._channel = credentials.channel(_validation.channel_options(options))
        ask = partial(begin_to_ask, self._channel, SERVER_INFO_METHOD, credentials, _ANSWER_TIMEOUT_S)
        self._server = ServerState(ask, may_leave)
        self._grpcio = GrpcioTransport(self._channel, target, credentials, self._server)
        self._own_memory = Pool(None)
        self._quarantine = quarantine
        self._discovery = EndpointDiscovery(target, credentials, self._server)
        self._ahead = AheadConnection()

    @property
    def is_remote(self) -> bool:
        """Whether the tensors of calls travel over a network, by our own HTTP/2, as far as is known."""
        return self._preference in ("auto", "stream") and self._discovery.is_remote

    @property
    def load(self) -> LoadReport | None:
        """What the server last reported of its load."""
        return self._server.load

    def run(self, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation) -> Result:
        """Makes a call, without retries; raises the errors of `bngrad.Client`."""
        self._wait_for_quarantine(request, deadline, cancellation)
        if self._preference == "unary":
            return self._send(request, self._grpcio, deadline, cancellation)
        endpoints = self._discovery.endpoints(self._ask_endpoints, deadline, cancellation)
        if self._prefers_shared(request, endpoints):
            try:
                return self._share(request, endpoints, deadline, cancellation)
            except (LeaseError, NotConnectedError) as error:
                self._lose_if_unreachable(endpoints, error, cancellation)
                is_late = isinstance(error, LeaseLateError)
                if is_late or cancellation.cancelled or self._preference == "shared":
                    raise self._not_shared(error, deadline) from error
            self._wait_for_quarantine(request, deadline, cancellation)
        for transport in self._http2_transports(endpoints):
            try:
                return self._send_rest(request, transport, deadline, cancellation)
            except NotConnectedError as error:
                if cancellation.cancelled:
                    raise UnavailableError(f"the call to {self._target} was cancelled") from error
                if not isinstance(error, NoConnectionYetError):
                    self._discovery.lose(endpoints, transport)
        return self._send(request, self._grpcio, deadline, cancellation)

    def server_info(self, deadline: Deadline, cancellation: Cancellation) -> ServerInfo:
        """Asks the server for its `ServerInfo`."""
        return self._ask(deadline, cancellation)[0]

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], deadline: Deadline, cancellation: Cancellation
    ) -> Array:
        """Makes an array in memory that is shared with the server.

        Raises:
            NotSharedError: There is no such memory.
        """
        if self._preference in ("unary", "stream"):
            raise self._not_shared(LeaseError(f"transport={self._preference!r} uses none"), deadline)
        endpoints = self._discovery.endpoints(self._ask_endpoints, deadline, cancellation)
        try:
            if endpoints.pool is None:
                raise self._no_memory(endpoints)
            return endpoints.pool.empty(shape, dtype, deadline, cancellation)
        except LeaseError as error:
            self._lose_if_unreachable(endpoints, error, cancellation)
            raise self._not_shared(error, deadline) from error

    def send_ahead(
        self, tensor: Array | None, forget: Sequence[bytes], deadline: Deadline, cancellation: Cancellation
    ) -> Place | None:
        """Sends a tensor ahead of the calls that need it, or copies it into shared memory; forgets others.

        Args:
            tensor: The tensor, in C order; None to forget others alone.
            forget: The tickets of tensors that are needed no longer.
            deadline: When to give up.
            cancellation: Lets another thread end it.

        Returns:
            Where it is; None where calls send such a tensor themselves.

        Raises:
            BngradError: The server does not take it.
            NotConnectedError: The server cannot be reached.
            LeaseError: It leases no memory.
        """
        endpoints = self._discovery.endpoints(self._ask_endpoints, deadline, cancellation)
        if tensor is not None and endpoints.pool is not None and self._shares_ahead(tensor):
            self._ahead.forget(forget, deadline, cancellation)  # first, since the copy may fail
            (copy,) = endpoints.pool.copies([tensor], deadline, cancellation)
            return Place(self, copy=copy.array)
        transport = next(self._http2_transports(endpoints), None)
        if transport is None:
            return None
        ticket = self._ahead.send(transport, tensor, forget, deadline, cancellation)
        return Place(self, ticket) if ticket else None

    def copy_to_gpu(self, copy: Array, deadline: Deadline, cancellation: Cancellation) -> bytes:
        """Has a GPU copy a tensor that lies in shared memory, ahead of the calls that need it.

        Asks the server only where it has said that it has a GPU for that.

        Returns:
            The ticket of the GPU's copy; empty if there will be none.

        Raises:
            BngradError: The server refuses it.
            NotConnectedError: The server cannot be reached.
        """
        endpoints = self._discovery.endpoints(self._ask_endpoints, deadline, cancellation)
        pool, unix, least_nbytes = endpoints.pool, endpoints.unix, endpoints.copied_ahead_nbytes
        if pool is None or unix is None or not 0 < least_nbytes <= copy.nbytes or (found := pool.locate(copy)) is None:
            return b""
        return self._ahead.send(unix, copy, (), deadline, cancellation, found.place)

    def close(self) -> None:
        """Closes the connections, and ends the calls made by grpcio; closing again does nothing."""
        self._channel.close()
        self._discovery.close()
        self._ahead.close()
        self._own_memory.close()

    def _wait_for_quarantine(
        self, request: PreparedRequest[Result], deadline: Deadline, cancellation: Cancellation
    ) -> None:
        """Waits until no failed call, or earlier attempt of this one, can write to the request's arrays."""
        if self._quarantine.is_empty:
            return
        if not self._quarantine.wait(request.arrays, deadline, cancellation):
            reason = "a call that failed may still write to an array of this call"
            raise from_status(grpc.StatusCode.DEADLINE_EXCEEDED, reason, b"", self._target, deadline.timeout)

    def _http2_transports(self, endpoints: Endpoints) -> Iterator[Http2Transport]:
        # With "stream", the server's TCP port comes first, even where its Unix socket is faster.
        is_tcp_first = self._preference == "stream"
        for transport in (endpoints.tcp, endpoints.unix) if is_tcp_first else (endpoints.unix, endpoints.tcp):
            if transport is not None:
                yield transport

    def _send_rest(
        self,
        request: PreparedRequest[Result],
        transport: Http2Transport,
        deadline: Deadline,
        cancellation: Cancellation,
    ) -> Result:
        """Makes a call with its tensors in messages, but for those that the server has."""
        if not request.ahead:
            return self._send(request, transport, deadline, cancellation)
        places = places_of(request.ahead, request.large, self, deadline, cancellation)
        tickets = {field: place.ticket for field, (_, place) in places.items() if place.copy is None}
        if tickets:
            try:
                return self._send(request, transport, deadline, cancellation, tickets)
            except UnknownTicketError:  # the server has evicted it, or is another one at the same address
                for field in tickets:
                    places[field][0].forget()
        return self._send(request, transport, deadline, cancellation)

    def _send(
        self,
        request: PreparedRequest[Result],
        transport: Http2Transport | GrpcioTransport,
        deadline: Deadline,
        cancellation: Cancellation,
        tickets: Mapping[str, bytes] = NO_TICKETS,
    ) -> Result:
        """Makes a call with its tensors in messages, but for those with tickets."""
        op = request.op
        is_small = request.nbytes < transport.unary_below_nbytes  # no such tensor has a ticket
        if self._preference == "unary" or (self._preference == "auto" and is_small):
            response = transport.unary(op.method, request.pieces(), deadline, cancellation)
            return request.read(response, request.out)
        results = [
            self._new_result(request) if out is None or not out.flags.c_contiguous else out for out in request.out
        ]
        tensors = [codec.elements_of(array) for field, array in request.large.items() if field not in tickets]
        response = transport.exchange(
            EXCHANGE_METHOD,
            op.number,
            request.header_pieces(tickets),
            tensors,
            [codec.view_of(result) for result in results],
            deadline,
            cancellation,
        )
        return request.read(response, request.delivered(results), apart=True)

    def _new_result(self, request: PreparedRequest[Result]) -> Array:
        is_small = request.nbytes < _POOLED_FROM_NBYTES
        return (np.empty if is_small else self._own_memory.empty)(request.shape, request.dtype)

    def _share(
        self, request: PreparedRequest[Result], endpoints: Endpoints, deadline: Deadline, cancellation: Cancellation
    ) -> Result:
        if endpoints.pool is None or endpoints.unix is None:
            raise self._no_memory(endpoints)
        shared = SharedMemoryCalls(endpoints.pool, endpoints.unix, self._quarantine, self)
        try:
            return shared.run(request, deadline, cancellation)
        except LeaseEndedError:  # ended by the server, or by another call that failed
            return shared.run(request, deadline, cancellation)

    def _prefers_shared(self, request: PreparedRequest[Result], endpoints: Endpoints) -> bool:
        if self._preference != "auto":
            return self._preference == "shared"
        return endpoints.pool is not None and request.nbytes >= _SHARED_FROM_NBYTES

    def _shares_ahead(self, tensor: Array) -> bool:
        return self._preference == "shared" or (self._preference == "auto" and tensor.nbytes >= _SHARED_FROM_NBYTES)

    def _no_memory(self, endpoints: Endpoints) -> LeaseError:
        """Returns why there is no shared memory; with "shared", an unreachable server on this host may come back."""
        if self._preference == "shared" and endpoints.is_local:
            return UnreachableError("its Unix socket does not answer")
        return LeaseError(_NOT_LOCAL)

    def _not_shared(self, error: Exception, deadline: Deadline) -> BngradError:
        if isinstance(error, LeaseLateError):
            return from_status(grpc.StatusCode.DEADLINE_EXCEEDED, str(error), b"", self._target, deadline.timeout)
        has_gone = isinstance(error, NotConnectedError | UnreachableError | LeaseEndedError)
        problem = f"{self._target} shares no memory with this client: {error}"
        if has_gone:
            return UnavailableError(problem)
        # With other transports there is other memory at once.
        is_worth_waiting = self._preference == "shared" and isinstance(error, LeaseRefusedError)
        return NotSharedError(problem, is_full=is_worth_waiting)

    def _ask(self, deadline: Deadline, cancellation: Cancellation) -> tuple[ServerInfo, pb.Endpoints]:
        answer = self._grpcio.unary(SERVER_INFO_METHOD, [], deadline, cancellation)
        self.has_answered = True
        return codec.read_server_info(answer)

    def _ask_endpoints(self, deadline: Deadline, cancellation: Cancellation) -> pb.Endpoints:
        return self._ask(deadline, cancellation)[1]

    def _lose_if_unreachable(self, endpoints: Endpoints, error: Exception, cancellation: Cancellation) -> None:
        """Drops the Unix socket if the error says that the server has ended, and is not due to a cancellation."""
        has_gone = isinstance(error, UnreachableError | NotConnectedError)
        is_passing = isinstance(error, NoConnectionYetError) or cancellation.cancelled
        if has_gone and not is_passing and endpoints.unix is not None:
            self._discovery.lose(endpoints, endpoints.unix)
