"""What clients send ahead of the requests that need it: tensors in the arena, and places in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bngrad_kernels.spec import TensorHeader
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.errors import OverloadedError
from bngrad_server.memory.ahead import AheadCopier, AheadTensors, ConnectionTickets
from bngrad_server.memory.ahead_places import AheadPlaces
from bngrad_server.memory.arena import Arena
from bngrad_server.memory.regions import Regions
from bngrad_server.memory.transfer_watchdog import TransferWatchdog
from bngrad_server.rpc_context import RpcContext
from bngrad_server.scheduling.admission import Admission


class SentAhead:
    """Takes what clients send ahead, within what each of them may have in the server.

    Attributes:
        tensors: The tensors in the arena.
        places: The tensors in shared memory that GPUs copy.
    """

    def __init__(
        self,
        arena: Arena,
        regions: Regions,
        copier: AheadCopier | None,
        admission: Admission,
        transfers: TransferWatchdog,
    ) -> None:
        """Has nothing yet; there is no copier without GPUs."""
        self.tensors = AheadTensors(arena, copier)
        self.places = AheadPlaces(regions, copier)
        self._arena = arena
        self._admission = admission
        self._transfers = transfers

    def receive(
        self, header: TensorHeader, tickets: ConnectionTickets, rpc: RpcContext, read_into: Callable[[memoryview], None]
    ) -> bytes:
        """Receives a tensor, and returns its ticket.

        Args:
            header: The tensor.
            tickets: Those of its connection, with which it ends.
            rpc: The call that it comes with.
            read_into: Fills memory with its elements.

        Raises:
            OverloadedError: The server is full, or the client has its share of it, or sends too slowly.
        """
        client, nbytes = rpc.client, header.nbytes
        self._admission.check(client, rpc.deadline)
        if self.tensors.nbytes_of(client) + nbytes > self._admission.room(client):
            problem = f"{nbytes} bytes sent ahead are more than this client may have besides (max_client_bytes)"
            raise OverloadedError(problem)
        block = self.tensors.allocate(nbytes, client)
        try:
            with self._transfers.upload(nbytes, rpc, self._arena, block, is_spare=True):
                read_into(self._arena.view[block.offset : block.offset + nbytes])
        except BaseException:
            self.tensors.free(block)
            raise
        return self.tensors.keep(header, block, tickets)

    def copy(self, header: TensorHeader, location: pb.Location, tickets: ConnectionTickets, rpc: RpcContext) -> bytes:
        """Has a GPU copy a tensor in shared memory, and returns its ticket; empty if no GPU copies it.

        Args:
            header: The tensor.
            location: Where it lies.
            tickets: Those of its connection, with which it ends.
            rpc: The call that it comes with.

        Raises:
            OverloadedError: The server is full.
            InvalidArgumentError: The client leases no such place.
        """
        self._admission.check(rpc.client, rpc.deadline)
        return self.places.keep(header, location, rpc.client, tickets)

    def forget(self, tickets: Iterable[bytes], client: str) -> None:
        """Forgets those of the tensors with these tickets that are the client's."""
        self.places.forget(tickets, client)
        self.tensors.forget(tickets, client)

    def end(self, tickets: ConnectionTickets) -> None:
        """Forgets what was sent ahead over a connection."""
        self.places.end(tickets)
        self.tensors.end(tickets)
