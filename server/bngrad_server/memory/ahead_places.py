"""Tensors in shared memory that clients have named ahead of the requests that need them, for GPUs to copy.

They lie where their clients have put them, so nothing is kept of them here but where that is. A request names that
place too, and is computed from there where there is no copy; so a tensor may be forgotten at any moment.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError, TensorHeader
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.memory.ahead import COPIED_NBYTES, TICKET_NBYTES, AheadCopier, ConnectionTickets
from bngrad_server.memory.layout import Place
from bngrad_server.memory.regions import Region, Regions


@dataclass(eq=False, slots=True)
class _Tensor:
    """A tensor that a GPU copies.

    Attributes:
        client: Who has named it, and alone may use the copy.
        place: Where it lies; its number is that of the copy.
        nbytes: Its size.
        tickets: All those of its connection, with which it ends.
    """

    client: str
    place: Place
    nbytes: int
    tickets: ConnectionTickets


class AheadPlaces:
    """The tensors in shared memory that GPUs copy ahead of their requests, of all clients."""

    def __init__(self, regions: Regions, copier: AheadCopier | None) -> None:
        """Has none yet, and never any without a copier."""
        self._regions = regions
        self._copier = copier
        self._mutex = threading.Lock()
        self._by_ticket: dict[bytes, _Tensor] = {}
        self._in_region: dict[int, dict[bytes, None]] = {}  # tickets by the region's number, the oldest first

    def __len__(self) -> int:
        return len(self._by_ticket)

    @property
    def least_nbytes(self) -> int:
        """The size of the smallest tensor that is copied; 0 if none is."""
        return 0 if self._copier is None else COPIED_NBYTES

    def keep(self, header: TensorHeader, location: pb.Location, client: str, tickets: ConnectionTickets) -> bytes:
        """Has a GPU copy a tensor, and returns its ticket; empty if none copies it.

        A region has at most as many tensors as fit side by side; beyond that, the oldest are forgotten.

        Raises:
            InvalidArgumentError: The location is no place for it in a region that the client leases.
        """
        region, place = self._regions.hold("tensor", location, header.nbytes)
        try:
            if region.client != client:
                problem = "the location of tensor must be in a region that the client of this call leases"
                raise InvalidArgumentError((FieldViolation("tensor", problem),))
            if self._copier is None or header.nbytes < COPIED_NBYTES:
                return b""
            return self._keep(self._copier, region, place, header.nbytes, tickets)
        finally:
            self._regions.release(region)

    def copied(self, place: Place, nbytes: int, ticket: bytes, client: str) -> Place:
        """Returns a place with the number of its copy, if the ticket is that of the client's tensor there."""
        tensor = self._by_ticket.get(ticket)
        if tensor is None or (tensor.client, tensor.nbytes) != (client, nbytes) or tensor.place[:2] != place[:2]:
            return place
        return tensor.place

    def forget(self, tickets: Iterable[bytes], client: str) -> None:
        """Forgets those of these tensors that are the client's."""
        with self._mutex:
            for ticket in tickets:
                if (tensor := self._by_ticket.get(ticket)) is not None and tensor.client == client:
                    self._forget(ticket)

    def end(self, tickets: ConnectionTickets) -> None:
        """Forgets all tensors that a connection has brought."""
        with self._mutex:
            for ticket in self._by_ticket.keys() & tickets:
                self._forget(ticket)

    def end_region(self, region: Region) -> None:
        """Forgets all tensors of a region that has ended."""
        with self._mutex:
            for ticket in list(self._in_region.get(region.number, ())):
                self._forget(ticket)

    def _keep(
        self, copier: AheadCopier, region: Region, place: Place, nbytes: int, tickets: ConnectionTickets
    ) -> bytes:
        ticket = secrets.token_bytes(TICKET_NBYTES)
        with self._mutex:
            in_region = self._in_region.get(region.number, {})
            if len(in_region) >= region.nbytes // COPIED_NBYTES:
                self._forget(next(iter(in_region)))
            number = copier.copy_ahead(place, nbytes)
            self._by_ticket[ticket] = _Tensor(region.client, place._replace(ahead=number), nbytes, tickets)
            self._in_region.setdefault(region.number, {})[ticket] = None
            tickets.add(ticket)
        return ticket

    def _forget(self, ticket: bytes) -> None:
        tensor = self._by_ticket.pop(ticket)
        tensor.tickets.discard(ticket)
        in_region = self._in_region[tensor.place.memory]
        del in_region[ticket]
        if not in_region:
            del self._in_region[tensor.place.memory]
        assert self._copier is not None
        self._copier.drop_copy(tensor.place.ahead)
