"""Pooled memory for tensors: the client's own, or regions that a server on this host leases.

Fresh pages cost several times more than the copy into them. A block returns to the pool when the last array in it has
gone, and serves the next array of about its size.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bngrad._credentials import NO_CREDENTIALS, Credentials
from bngrad._deadline import ENDLESS, Cancellation, Deadline, acquire
from bngrad._shared_memory.copier import Copier
from bngrad._shared_memory.lease import LeaseEndedError, LeaseError, LeaseLateError, UnreachableError, lease_region
from bngrad._shared_memory.region import PoolRegion
from bngrad.typing import Array
from bngrad_wire.lease_protocol import ALIGNMENT
from bngrad_wire.limits import REGION_NBYTES

_GONE = "the server has gone, or the client was closed"


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """A block of a region, in bytes."""

    region: PoolRegion
    offset: int
    nbytes: int


class _Owner(np.ndarray[Any, Any]):
    """The bytes of a block, which are returned to the pool when the last array in them has gone."""

    block: PoolBlock | None = None
    returned: deque[PoolBlock]

    def __del__(self) -> None:
        block = self.block
        if block is not None and not block.region.is_forgotten:
            self.returned.append(block)


class Located(NamedTuple):
    """An array in C order that lies in a region, and where it begins there, in bytes."""

    array: Array
    region: PoolRegion
    offset: int

    @property
    def place(self) -> tuple[bytes, int]:
        """The key of the region, and the offset."""
        return self.region.key, self.offset


class Pool:
    """Blocks of memory for arrays: the client's own, or of a server that leases regions at a Unix socket's path."""

    def __init__(self, path: str | None, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._path = path
        self._credentials = credentials
        self._mutex = threading.Lock()
        self._growing = threading.RLock()
        self._regions: list[PoolRegion] = []
        self._free: dict[int, list[PoolBlock]] = {}
        # Arrays that go append here, at any moment and in any thread, so without a lock.
        self._returned: deque[PoolBlock] = deque()
        self._copier = Copier()
        self._closed = False

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        deadline: Deadline = ENDLESS,
        cancellation: Cancellation | None = None,
    ) -> Array:
        """Makes an array, whose elements are undefined.

        Raises:
            LeaseError: The server does not lease the memory for it.
            MemoryError: This host has not enough memory.
        """
        return self.new(shape, dtype, deadline, cancellation or Cancellation()).array

    def new(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], deadline: Deadline, cancellation: Cancellation
    ) -> Located:
        """Does as `empty`, and says where the array lies."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._take(_size_class(nbytes), deadline, cancellation)
        owner: _Owner | None = None
        try:
            block.region.ask_for_huge_pages(block.offset, block.nbytes)
            owner = _Owner(max(nbytes, 1), np.uint8, block.region.memory, block.offset)
            owner.returned, owner.block = self._returned, block
        except BaseException:  # such as Ctrl-C
            if owner is None or owner.block is None:
                self._returned.append(block)
            raise
        return Located(np.ndarray(shape, dtype, owner.data), block.region, block.offset)

    def copies(self, arrays: Sequence[Array], deadline: Deadline, cancellation: Cancellation) -> list[Located]:
        """Returns arrays in this memory: those that lie in it, and copies of the others.

        Raises:
            LeaseError: As `empty` raises.
        """
        found = [self.locate(array) or self.new(array.shape, array.dtype, deadline, cancellation) for array in arrays]
        pairs = [(to.array, array) for to, array in zip(found, arrays, strict=True) if to.array is not array]
        self._copier.copy(pairs)
        return found

    def locate(self, array: Array) -> Located | None:
        """Returns where an array in C order lies; None if no region holds it."""
        address: int = array.__array_interface__["data"][0]  # array.ctypes runs Python
        for region in tuple(self._regions):  # a copy, since other threads change it
            offset = address - region.address
            if 0 <= offset <= region.nbytes - array.nbytes and offset % ALIGNMENT == 0:
                return Located(array, region, offset)
        return None

    def hold(self, region: PoolRegion) -> None:
        """Keeps the lease of a region until `PoolRegion.close` is called once more.

        Raises:
            LeaseEndedError: It has ended.
        """
        with self._mutex:
            if region not in self._regions:
                raise LeaseEndedError("a lease has ended")
            region.hold()

    def check(self) -> bool:
        """Removes regions that the server no longer knows, and returns whether there were any."""
        with self._mutex:
            dead = [region for region in self._regions if not region.is_alive]
            for region in dead:
                self._forget(region)
        return bool(dead)

    def close(self) -> None:
        """Ends every lease; arrays remain usable."""
        with self._mutex:
            self._closed = True
            self._copier.close()
            self._collect()
            for region in list(self._regions):
                self._forget(region)

    def _take(self, nbytes: int, deadline: Deadline, cancellation: Cancellation) -> PoolBlock:
        block = self._find(nbytes)
        if block is not None:
            return block
        # One thread at a time, or each would lease a region; not under the mutex, since the server may be slow.
        try:
            if not acquire(self._growing, deadline, cancellation):
                if cancellation.cancelled:
                    raise LeaseEndedError("the call was cancelled")
                raise LeaseLateError("another call still waits for memory")
            while (block := self._find(nbytes)) is None:
                self._grow(max(nbytes, REGION_NBYTES), deadline, cancellation)
            return block
        finally:
            try:  # noqa: SIM105 - Ctrl-C could come before suppress() has begun
                self._growing.release()
            except RuntimeError:  # it is not held
                pass

    def _find(self, nbytes: int) -> PoolBlock | None:
        """Returns a block of the existing regions."""
        with self._mutex:
            self._collect()
            free = self._free.get(nbytes)
            block = free.pop() if free else self._cut(nbytes)
            if block is not None:
                block.region.blocks += 1
            return block

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            block.region.blocks -= 1
            if block.region in self._regions:
                self._free.setdefault(block.nbytes, []).append(block)

    def _cut(self, nbytes: int) -> PoolBlock | None:
        """Returns a new block of a region that has room, or that has no arrays left and can start again."""
        for region in self._regions:
            if region.used + nbytes > region.nbytes and region.blocks == 0 and nbytes <= region.nbytes:
                self._drop_free_blocks(region)
                region.used = 0
            if region.used + nbytes <= region.nbytes:
                region.used += nbytes
                return PoolBlock(region, region.used - nbytes, nbytes)
        return None

    def _grow(self, nbytes: int, deadline: Deadline, cancellation: Cancellation) -> None:
        """Adds a region."""
        with self._mutex:
            for region in [region for region in self._regions if region.blocks == 0]:
                self._forget(region)  # too small: the new region must be larger
        region = self._new_region(nbytes, deadline, cancellation)
        with self._mutex:
            if not self._closed:
                self._regions.append(region)
                return
        region.close()
        raise UnreachableError(_GONE)

    def _new_region(self, nbytes: int, deadline: Deadline, cancellation: Cancellation) -> PoolRegion:
        if self._closed:
            raise UnreachableError(_GONE)
        if self._path is None:
            try:
                return PoolRegion(nbytes, None)
            except (OSError, OverflowError) as error:
                raise MemoryError(f"no {nbytes} bytes for an array: {error}") from error
        lease = lease_region(self._path, nbytes, self._credentials.authorization(), deadline, cancellation)
        try:
            return PoolRegion(nbytes, lease)
        except OSError as error:
            raise LeaseError(f"the leased memory cannot be mapped: {error}") from error

    def _forget(self, region: PoolRegion) -> None:
        region.is_forgotten = True
        self._drop_free_blocks(region)
        self._regions.remove(region)
        if region.blocks == 0:
            with contextlib.suppress(BufferError):  # the last array is just going
                region.unmap()  # before the lease ends, or the server would still count it
        region.close()

    def _drop_free_blocks(self, region: PoolRegion) -> None:
        for nbytes, blocks in list(self._free.items()):
            kept = [block for block in blocks if block.region is not region]
            if kept:
                self._free[nbytes] = kept
            else:
                del self._free[nbytes]


def _size_class(nbytes: int) -> int:
    """Rounds up to the size of a block: there are few sizes, so that blocks are reused, and at most 1/8 is wasted."""
    step = max(ALIGNMENT, 1 << max(nbytes.bit_length() - 4, 0))
    return max(step, -(-nbytes // step) * step)
