"""Tensors that clients have sent ahead of the requests that need them; they lie in the arena.

They have the memory that requests leave: at most half of the arena, and only while no request waits for any. A request
that must wait evicts tensors until it fits, and a client's tensor evicts those of a client that has more. Each time,
the client with most of the memory loses its oldest one. Nothing is lost thereby: the client sends it again with the
request.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError, TensorHeader
from bngrad_server.errors import OverloadedError, UnknownTicketError
from bngrad_server.memory.allocator import Block
from bngrad_server.memory.arena import Arena
from bngrad_server.memory.layout import ARENA, Place

ConnectionTickets: TypeAlias = set[bytes]
"""The tickets of the tensors that a connection has brought."""

COPIED_NBYTES = 32 * 2**20
"""The size from which a GPU copies a tensor ahead: on an H100 it won at 100 MB, and did not at 25."""
_ARENA_FRACTION = 2
"""All tensors together have at most one part in this many of the arena."""
_LEAST_NBYTES = 64 * 1024
"""A smaller tensor counts as one of this size, which bounds their number."""
TICKET_NBYTES = 16


class AheadCopier(Protocol):
    """Has GPUs copy tensors ahead of their requests."""

    def copy_ahead(self, place: Place, nbytes: int) -> int:
        """Has a GPU copy a tensor, and returns the number that it knows the copy by."""

    def drop_copy(self, number: int) -> None:
        """Has it drop the copy."""


@dataclass(eq=False, slots=True)
class AheadTensor:
    """A tensor that was sent ahead.

    Attributes:
        ticket: What requests name it by.
        client: Who has sent it, and alone may use it.
        dtype: The type of its elements.
        shape: Its shape.
        block: Its memory.
        tickets: All those of its connection, with which it ends.
        number: What a GPU's worker knows it by; 0 without GPUs.
        holds: How many requests use it.
        is_kept: Whether requests may still name it.
    """

    ticket: bytes
    client: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    block: Block
    tickets: ConnectionTickets
    number: int
    holds: int = 0
    is_kept: bool = True


class AheadTensors:
    """The tensors that were sent ahead, of all clients.

    Attributes:
        evicted: How many have been evicted so far.
    """

    def __init__(self, arena: Arena, copier: AheadCopier | None = None) -> None:
        """Has none yet; the arena is their memory, and there is no copier without GPUs."""
        self.evicted = 0
        self._arena = arena
        self._copier = copier
        self._limit = arena.nbytes // _ARENA_FRACTION
        self._mutex = threading.Lock()
        self._by_ticket: dict[bytes, AheadTensor] = {}
        self._of: dict[str, dict[AheadTensor, None]] = {}  # by client, the oldest first
        self._nbytes_of: Counter[str] = Counter()  # with those that are being received
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._by_ticket)

    @property
    def nbytes(self) -> int:
        """How much of the arena they have, with those that are being received."""
        return self._nbytes

    def nbytes_of(self, client: str) -> int:
        """How much of it a client's have."""
        return self._nbytes_of[client]

    def allocate(self, nbytes: int, client: str) -> Block:
        """Takes memory for a tensor, until `keep` or `free`, at once or not at all.

        Raises:
            OverloadedError: There is none, or the client has its share.
        """
        counted = _counted(nbytes)
        with self._mutex:
            while self._arena.may_spare(client):
                fits = self._nbytes + counted <= self._limit
                block = self._arena.allocate_spare(nbytes, client) if fits else None
                if block is not None:
                    self._count(client, block.nbytes)
                    return block
                if not self._evict_of_richest(above=self._nbytes_of[client] + counted):
                    break
        raise OverloadedError(f"no {nbytes} bytes of memory are free for a tensor sent ahead")

    def free(self, block: Block) -> None:
        """Takes memory back that has become no tensor."""
        with self._mutex:
            self._free(block)

    def keep(self, header: TensorHeader, block: Block, tickets: ConnectionTickets) -> bytes:
        """Keeps a tensor, whose elements are in its memory, and returns its ticket."""
        ticket = secrets.token_bytes(TICKET_NBYTES)
        with self._mutex:
            number = 0
            if self._copier is not None and header.nbytes >= COPIED_NBYTES:
                number = self._copier.copy_ahead(Place(ARENA, block.offset), header.nbytes)
            tensor = AheadTensor(ticket, block.client, header.dtype, header.shape, block, tickets, number)
            self._by_ticket[ticket] = tensor
            self._of.setdefault(block.client, {})[tensor] = None
            tickets.add(ticket)
        return ticket

    def check(self, field: str, ticket: bytes, client: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Checks that a client's request may name a ticket.

        Raises:
            UnknownTicketError: The client has no such tensor here, or no longer.
            InvalidArgumentError: The tensor has another dtype or shape.
        """
        with self._mutex:
            self._find(field, ticket, client, dtype, shape)

    def hold(self, field: str, ticket: bytes, client: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> AheadTensor:
        """Does as `check`, and returns the tensor, which stays until `release`."""
        with self._mutex:
            tensor = self._find(field, ticket, client, dtype, shape)
            tensor.holds += 1
            return tensor

    def release(self, tensor: AheadTensor) -> None:
        """Ends a `hold`."""
        with self._mutex:
            tensor.holds -= 1
            if not tensor.is_kept and not tensor.holds:
                self._end(tensor)

    def forget(self, tickets: Iterable[bytes], client: str) -> None:
        """Forgets those of these tensors that are the client's."""
        with self._mutex:
            for ticket in tickets:
                tensor = self._by_ticket.get(ticket)
                if tensor is not None and tensor.client == client:
                    self._forget(tensor)

    def end(self, tickets: ConnectionTickets) -> None:
        """Forgets all tensors that a connection has brought."""
        with self._mutex:
            for ticket in list(tickets):
                self._forget(self._by_ticket[ticket])

    def evict(self) -> bool:
        """Makes room in the arena; returns whether there was a tensor to evict."""
        if not self._by_ticket:
            return False
        with self._mutex:
            return self._evict_of_richest()

    def limit(self, client: str, nbytes: float) -> None:
        """Evicts a client's tensors that are not in use until they have no more than this."""
        if not self._by_ticket:
            return
        with self._mutex:
            while self._nbytes_of[client] > nbytes and self._evict_of(client):
                pass

    def _find(
        self, field: str, ticket: bytes, client: str, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> AheadTensor:
        tensor = self._by_ticket.get(ticket)
        if tensor is None or tensor.client != client:
            raise UnknownTicketError(f"{field} has the ticket of no tensor that is still here: send its elements")
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            problem = f"must have shape {shape} of {dtype.name}, not {tensor.shape} of {tensor.dtype.name}"
            raise InvalidArgumentError((FieldViolation(field, f"the tensor of the ticket of {field} {problem}"),))
        return tensor

    def _evict_of_richest(self, above: int = 0) -> bool:
        """Evicts a tensor of the client that has most memory, if that is more than ``above``."""
        clients = sorted(self._of, key=lambda client: -self._nbytes_of[client])
        return any(self._nbytes_of[client] > above and self._evict_of(client) for client in clients)

    def _evict_of(self, client: str) -> bool:
        """Evicts the oldest tensor of a client that no request uses; returns whether there was one."""
        oldest = next((tensor for tensor in self._of.get(client, ()) if not tensor.holds), None)
        if oldest is None:
            return False
        self._forget(oldest)
        self.evicted += 1
        return True

    def _forget(self, tensor: AheadTensor) -> None:
        tensor.is_kept = False
        del self._by_ticket[tensor.ticket]
        tensor.tickets.discard(tensor.ticket)
        tensors = self._of[tensor.client]
        del tensors[tensor]
        if not tensors:
            del self._of[tensor.client]
        if not tensor.holds:
            self._end(tensor)

    def _end(self, tensor: AheadTensor) -> None:
        if self._copier is not None and tensor.number:
            self._copier.drop_copy(tensor.number)
        self._free(tensor.block)

    def _free(self, block: Block) -> None:
        self._count(block.client, -block.nbytes)
        self._arena.free(block)

    def _count(self, client: str, nbytes: int) -> None:
        counted = _counted(nbytes) if nbytes > 0 else -_counted(-nbytes)
        self._nbytes += counted
        self._nbytes_of[client] += counted
        if not self._nbytes_of[client]:
            del self._nbytes_of[client]


def _counted(nbytes: int) -> int:
    return max(nbytes, _LEAST_NBYTES)
