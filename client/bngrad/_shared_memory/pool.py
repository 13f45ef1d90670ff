"""Pooled memory for tensors: the client's own, or regions that a server on this host leases.

Fresh pages cost several times more than the copy into them. A block returns to the pool when the last array in it has
gone, and serves the next array of about its size.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
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
from bngrad_wire.mapped_file import address_of_array

_GONE = "the server has gone, or the client was closed"


@dataclass(frozen=True, slots=True, eq=False)
class PoolBlock:
    """A block of a region, in bytes."""

    region: PoolRegion
    offset: int
    nbytes: int


class _Loan(weakref.ref[Array]):
    """Refers to the memory of a block that is in use; comes back to the pool when the last array there has gone.

    No Python code runs for that, since Ctrl-C could end it.
    """

    block: PoolBlock | None = None


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
        # By size. A block may be there twice, or be in use, where Ctrl-C came amid a change.
        self._free: dict[int, list[PoolBlock]] = {}
        self._in_use: dict[PoolBlock, _Loan] = {}
        # Arrays that go append here, at any moment and in any thread, so without a lock.
        self._returned: deque[_Loan] = deque()
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
        block, memory = self._take(_size_class(nbytes), deadline, cancellation)
        block.region.ask_for_huge_pages(block.offset, block.nbytes)
        return Located(np.ndarray(shape, dtype, memory.data), block.region, block.offset)

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
        address = address_of_array(array)
        for region in tuple(self._regions):  # a copy, since other threads change it
            offset = address - region.address
            if 0 <= offset <= region.nbytes - array.nbytes and offset % ALIGNMENT == 0:
                return Located(array, region, offset)
        return None

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

    def _take(self, nbytes: int, deadline: Deadline, cancellation: Cancellation) -> tuple[PoolBlock, Array]:
        """Returns a block and its memory; it is in use as long as anything refers to the latter."""
        if (taken := self._find(nbytes)) is not None:
            return taken
        # One thread at a time, or each would lease a region; not under the mutex, since the server may be slow.
        try:
            if not acquire(self._growing, deadline, cancellation):
                if cancellation.cancelled:
                    raise LeaseEndedError("the call was cancelled")
                raise LeaseLateError("another call still waits for memory")
            while (taken := self._find(nbytes)) is None:
                self._grow(max(nbytes, REGION_NBYTES), deadline, cancellation)
            return taken
        finally:
            try:  # noqa: SIM105 - Ctrl-C could come before suppress() has begun
                self._growing.release()
            except RuntimeError:  # it is not held
                pass

    def _find(self, nbytes: int) -> tuple[PoolBlock, Array] | None:
        """Takes a block of the existing regions."""
        with self._mutex:
            self._collect()
            while free := self._free.get(nbytes) or self._cut(nbytes):
                block = free[-1]
                memory = None if block in self._in_use else self._lend(block)
                free.pop()  # only now, or Ctrl-C could lose the block
                if memory is not None:
                    return block, memory
            return None

    def _lend(self, block: PoolBlock) -> Array:
        memory = np.ndarray(block.nbytes, np.uint8, block.region.memory, block.offset)
        loan = _Loan(memory, self._returned.append)
        loan.block = block
        self._in_use[block] = loan
        return memory

    def _collect(self) -> None:
        while self._returned:
            loan = self._returned[0]
            block = loan.block
            if block is not None and self._in_use.get(block) is loan:
                if block.region in self._regions:
                    self._free.setdefault(block.nbytes, []).append(block)
                del self._in_use[block]
            self._returned.popleft()  # only now, as above

    def _cut(self, nbytes: int) -> list[PoolBlock]:
        """Frees a new block of a region that has room, or that has no arrays left and can start again.

        Returns:
            The free blocks of this size.
        """
        free = self._free.setdefault(nbytes, [])
        for region in self._regions:
            if region.used + nbytes > region.nbytes >= nbytes and not self._is_used(region):
                self._drop_free_blocks(region)
                region.used = 0
            if region.used + nbytes <= region.nbytes:
                block = PoolBlock(region, region.used, nbytes)
                region.used += nbytes  # Ctrl-C comes after a call, so not between these two
                free.append(block)
                break
        return free

    def _grow(self, nbytes: int, deadline: Deadline, cancellation: Cancellation) -> None:
        """Adds a region."""
        with self._mutex:
            for region in [region for region in self._regions if not self._is_used(region)]:
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

    def _is_used(self, region: PoolRegion) -> bool:
        return any(block.region is region for block in self._in_use)

    def _forget(self, region: PoolRegion) -> None:
        self._drop_free_blocks(region)
        self._regions.remove(region)
        blocks = [block for block in self._in_use if block.region is region]
        for block in blocks:
            del self._in_use[block]  # the memory goes with the last array in it
        if not blocks:
            with contextlib.suppress(BufferError):  # the last array is just going
                region.unmap()  # before the lease ends, or the server would still count it
        region.close()

    def _drop_free_blocks(self, region: PoolRegion) -> None:
        for blocks in self._free.values():
            blocks[:] = [block for block in blocks if block.region is not region]


def _size_class(nbytes: int) -> int:
    """Rounds up to the size of a block: there are few sizes, so that blocks are reused, and at most 1/8 is wasted."""
    step = max(ALIGNMENT, 1 << max(nbytes.bit_length() - 4, 0))
    return max(step, -(-nbytes // step) * step)
