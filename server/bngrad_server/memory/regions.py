"""Memory that clients on this host share with the workers.

A region is an anonymous file, sealed against shrinking, so that no client can pull memory from under a worker. It is
leased for the life of a connection to a Unix socket, over which its descriptor travels: when the client ends, however
it ends, so does the lease. A region goes once its lease has ended and no job names it any more.
"""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.errors import RegionsFullError
from bngrad_server.workers.ipc import Place
from bngrad_server.workers.slot import MappedRegion

ALIGNMENT = 64
"""Tensors in a region begin at multiples of this, in bytes."""
_MAX_REGIONS = 1024
"""Of few descriptors, a quarter: each takes two, with its connection."""


@dataclass(eq=False, slots=True)
class Region:
    """A leased region.

    Attributes:
        number: Its name among the workers.
        key: Its name for the one client that leases it: 16 random bytes.
        fd: Its file descriptor.
        nbytes: Its size.
        holds: How many requests name it.
        leased: Whether its client is still there.
    """

    number: int
    key: bytes
    fd: int
    nbytes: int
    holds: int = 0
    leased: bool = True


class Regions:
    """All regions, by their keys."""

    def __init__(
        self, max_nbytes: int, on_begin: Callable[[int, MappedRegion], None], on_end: Callable[[int], None]
    ) -> None:
        """There are none yet.

        Args:
            max_nbytes: What all of them may take together.
            on_begin: Called with the number of a new region.
            on_end: Called with the number of a region that nobody names any more.
        """
        self._max_nbytes = max_nbytes
        self._on_begin = on_begin
        self._on_end = on_end
        self._mutex = threading.Lock()
        self._by_key: dict[bytes, Region] = {}
        self._most = min(_MAX_REGIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._last_number = 0
        self._nbytes = 0

    def lease(self, nbytes: int) -> Region:
        """Makes a region.

        Raises:
            RegionsFullError: It would be too much, or one too many.
            OSError: The system has no file for it.
        """
        with self._mutex:
            if len(self._by_key) >= self._most:
                raise RegionsFullError(f"no more than {self._most} regions are leased at once")
            if self._nbytes + nbytes > self._max_nbytes:
                raise RegionsFullError(
                    f"a region of {nbytes} bytes is more than is left of the {self._max_nbytes} bytes to share"
                )
            fd = _sealed_file(nbytes)
            self._nbytes += nbytes
            self._last_number += 1
            number = self._last_number
        region = Region(number, secrets.token_bytes(16), fd, nbytes)
        self._on_begin(number, MappedRegion(region.fd, nbytes))
        with self._mutex:
            self._by_key[region.key] = region
        return region

    def end(self, region: Region) -> None:
        """Ends a lease."""
        with self._mutex:
            region.leased = False
            del self._by_key[region.key]
            is_last = region.holds == 0
        if is_last:
            self._drop(region)

    def hold(self, field: str, location: pb.Location, nbytes: int) -> tuple[Region, Place]:
        """Finds a place in a region, which stays until it is released.

        Raises:
            InvalidArgumentError: There is no such place; it names the field.
        """
        with self._mutex:
            region = self._by_key.get(location.region_key)
            if region is None:
                problem = "has the key of no region that is leased"
            elif location.offset % ALIGNMENT or location.offset < 0:
                problem = f"must begin at a multiple of {ALIGNMENT} bytes, not at {location.offset}"
            elif location.offset + nbytes > region.nbytes:
                problem = f"must end within the region's {region.nbytes} bytes, not at {location.offset + nbytes}"
            else:
                region.holds += 1
                return region, Place(region.number, location.offset)
        raise InvalidArgumentError((FieldViolation(field, f"the location of {field} {problem}"),))

    def release(self, region: Region) -> None:
        """Takes back one `hold`."""
        with self._mutex:
            region.holds -= 1
            is_last = region.holds == 0 and not region.leased
        if is_last:
            self._drop(region)

    def __len__(self) -> int:
        """How many are leased."""
        return len(self._by_key)

    @property
    def nbytes(self) -> int:
        """What all regions take together."""
        return self._nbytes

    def _drop(self, region: Region) -> None:
        self._on_end(region.number)
        os.close(region.fd)
        with self._mutex:
            self._nbytes -= region.nbytes


def _sealed_file(nbytes: int) -> int:
    fd = os.memfd_create("bngrad-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
