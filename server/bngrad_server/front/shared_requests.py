"""Computes requests whose large tensors lie in memory that clients share.

They need no copies, so a hop to a worker and back takes much of their time: a third of it at 1 MB a tensor. But what is
computed here keeps the thread from its other connections. So only small requests are computed here always, and brief
ones until they have taken their part of a round of events. A larger one is computed here only if nothing else is in the
server; if others wait when it is done, the next ones go to workers for a while, which compute while the thread goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.request import Request
from bngrad_server.front.kernels import FrontKernels, failed
from bngrad_server.front.prepared import Prepared, aligned_memory
from bngrad_server.memory.layout import ARENA, Place
from bngrad_server.memory.regions import Region, Regions
from bngrad_server.runtime.event_loop import EventLoop
from bngrad_server.staged_request import check_overlap
from bngrad_wire.fields import Buffer
from bngrad_wire.mapped_file import MappedFile

_SMALL, _LARGEST = 0.25, 128
"""The largest small request and the largest one computed here alone, as multiples of the largest brief one: 768 KiB and
384 MiB by default. The latter takes some hundredths of a second."""
_ROUND_S = 0.001
"""How much of a round of the event loop brief ones may take."""
_CROWDED_S = 1.0
"""For how long longer ones go to workers once others have waited for one."""
_MAX_KNOWN_NBYTES = 48 << 20
"""How much memory the requests that were computed before may take."""
_KNOWN_NBYTES = 8 << 10
"""What one of them takes beside its 1-D tensors, at most."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A request that was computed before."""

    prepared: Prepared
    regions: list[Region]
    run: Callable[[], None]


class SharedRequests:
    """Computes requests, for the thread of an event loop.

    Attributes:
        event_loop: The event loop, which its port sets.
    """

    event_loop: EventLoop

    def __init__(self, kernels: FrontKernels, regions: Regions, brief_nbytes: int, is_idle: Callable[[], bool]) -> None:
        """Knows no requests yet.

        Args:
            kernels: The kernels.
            regions: The memory that is shared.
            brief_nbytes: The size of the largest brief requests, 0 to compute nothing here.
            is_idle: Returns whether no other request is in the server.
        """
        self._kernels = kernels
        self._regions = regions
        self._brief_nbytes = brief_nbytes
        self._small_nbytes = _SMALL * brief_nbytes
        self._is_idle = is_idle
        self._known: dict[int, _Known] = {}
        self._known_nbytes = 0
        self._mapped: dict[int, MappedFile] = {}
        self._round = 0
        self._round_s = 0.0  # for which requests were computed in that round
        self._crowded_until = 0.0

    def takes(self, request: Request) -> bool:
        """Whether it computes a request, now."""
        if request.tensors_nbytes > self._small_nbytes and not self._has_time(request.tensors_nbytes):
            return False
        if id(request) in self._known:
            return True
        places = request.large_inputs + request.locations
        if not all(isinstance(place, pb.Location) for place in places) or not request.sizes.tensor:
            return False
        return request.sizes.all_stats <= self._brief_nbytes and self._kernels.has(request.spec)

    def compute(self, request: Request, message: Buffer) -> list[bytes]:
        """Computes a request that it `takes`, and returns the one message of the response.

        Raises:
            InvalidArgumentError: The request names memory that is not leased, or tensors overlap.
            ComputeError: It cannot be computed.
            MemoryError: The shared memory cannot be mapped.
        """
        known = self._known.get(id(request))
        if known is None or not all(region.leased for region in known.regions):
            known = self._prepare(request)
        known.prepared.copy_in(message)
        began = time.monotonic()
        try:
            known.run()
        except Exception as error:
            raise failed(request.spec, error) from error
        if request.tensors_nbytes > self._small_nbytes:
            self._count(request.tensors_nbytes, began)
        return known.prepared.response()

    def forget(self, region: Region) -> None:
        """Unmaps a region that is no longer leased; for any thread."""
        if self._mapped.pop(region.number, None) is not None:
            self._forget_known()  # their arrays would keep the memory mapped

    def _has_time(self, nbytes: int) -> bool:
        """Whether a request that is not small may be computed now."""
        if nbytes <= self._brief_nbytes:
            return self.event_loop.rounds != self._round or self._round_s < _ROUND_S
        if nbytes > _LARGEST * self._brief_nbytes or not self._is_idle():
            return False
        return time.monotonic() >= self._crowded_until

    def _count(self, nbytes: int, began: float) -> None:
        """Counts the time since ``began``, in which such a request was computed."""
        now, event_loop = time.monotonic(), self.event_loop
        if nbytes > self._brief_nbytes and event_loop.has_events():
            self._crowded_until = now + _CROWDED_S
        if event_loop.rounds != self._round:
            self._round, self._round_s = event_loop.rounds, 0.0
        self._round_s += now - began

    def _prepare(self, request: Request) -> _Known:
        if self._known_nbytes > _MAX_KNOWN_NBYTES:
            self._forget_known()
        regions: list[Region] = []
        places: list[Place] = []
        fields = request.op.large_inputs + request.op.locations
        try:
            for field, location in zip(fields, request.large_inputs + request.locations, strict=True):
                assert isinstance(location, pb.Location)
                region, place = self._regions.hold(field, location, request.sizes.tensor)
                regions.append(region)
                places.append(place)
            check_overlap(request, places)
            memories = {region.number: self._memory(region) for region in regions}
            prepared = Prepared(request, places, {**memories, ARENA: aligned_memory(request.sizes.all_stats)})
            known = self._known[id(request)] = _Known(prepared, regions, self._kernels.bound(prepared.problem))
            self._known_nbytes += _KNOWN_NBYTES + request.sizes.all_stats
            return known
        finally:
            for region in regions:
                self._regions.release(region)

    def _forget_known(self) -> None:
        self._known.clear()
        self._known_nbytes = 0

    def _memory(self, region: Region) -> memoryview:
        if region.number not in self._mapped:
            try:
                self._mapped[region.number] = MappedFile(region.fd, region.nbytes)
            except OSError as error:
                problem = f"{region.nbytes} bytes of shared memory cannot be mapped: {error.strerror}"
                raise MemoryError(problem) from error
        return self._mapped[region.number].view
