"""Memory that clients on this host share with the workers.

A region is an anonymous file, sealed against shrinking, so that no client can take memory away while a worker uses it.
It is leased for the life of a connection to a Unix socket, over which its descriptor is sent: when the client ends, in
whatever way, so does the lease. A region is freed once its lease has ended and no request names it.
"""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.errors import RegionsFullError
from bngrad_server.memory.layout import Place
from bngrad_wire.lease_protocol import ALIGNMENT, KEY_NBYTES

_MAX_REGIONS = 1024
_DESCRIPTOR_FRACTION = 8
"""At most one region for this many descriptors that the process may have; each takes two, with its connection."""


@dataclass(eq=False, slots=True)
class Region:
    """A region that is leased, or that requests still name.

    Attributes:
        number: The number by which tasks name it.
        key: Random bytes by which the one client that leases it names it.
        fd: Its file descriptor.
        nbytes: Its size.
        holds: How many requests name it.
        leased: Whether its lease lasts.
    """

    number: int
    key: bytes
    fd: int
    nbytes: int
    holds: int = 0
    leased: bool = True


class Regions:
    """All regions."""

    def __init__(self, max_nbytes: int, on_begin: Callable[[Region], None], on_end: Callable[[Region], None]) -> None:
        """Calls ``on_end`` with each region that is neither leased nor named by requests, before closing its file."""
        self._max_nbytes = max_nbytes
        self._on_begin = on_begin
        self._on_end = on_end
        self._mutex = threading.Lock()
        self._by_key: dict[bytes, Region] = {}  # those that are leased
        self._all: dict[int, Region] = {}
        self._max_leases = min(_MAX_REGIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTOR_FRACTION)
        self._last_number = 0
        self._nbytes = 0

    def lease(self, nbytes: int) -> Region:
        """Makes a region, and leases it until `end`.

        Raises:
            RegionsFullError: There would be too many bytes, or too many regions.
            OSError: The system cannot make its file.
        """
        with self._mutex:
            if len(self._by_key) >= self._max_leases:
                raise RegionsFullError(f"no more than {self._max_leases} regions are leased at once")
            if self._nbytes + nbytes > self._max_nbytes:
                raise RegionsFullError(
                    f"a region of {nbytes} bytes is more than is left of the {self._max_nbytes} bytes to share"
                )
            fd = _sealed_file(nbytes)
            self._nbytes += nbytes
            self._last_number += 1
            number = self._last_number
        region = Region(number, secrets.token_bytes(KEY_NBYTES), fd, nbytes)
        self._on_begin(region)
        with self._mutex:
            self._by_key[region.key] = self._all[number] = region
        return region

    def end(self, region: Region) -> None:
        """Ends a lease, and frees the region unless requests name it."""
        with self._mutex:
            region.leased = False
            del self._by_key[region.key]
            is_last = region.holds == 0
        if is_last:
            self._free(region)

    def hold(self, field: str, location: pb.Location, nbytes: int) -> tuple[Region, Place]:
        """Finds a place in a region, which stays until `release`.

        Args:
            field: The field of the request that names the place.
            location: The place.
            nbytes: The size of the tensor there.

        Raises:
            InvalidArgumentError: There is no such place.
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
        """Undoes one `hold`, and frees the region if that was the last and its lease has ended."""
        with self._mutex:
            region.holds -= 1
            is_last = region.holds == 0 and not region.leased
        if is_last:
            self._free(region)

    def __len__(self) -> int:
        """How many are leased."""
        return len(self._by_key)

    def __iter__(self) -> Iterator[Region]:
        """All regions, also those that are no longer leased and that requests still name."""
        with self._mutex:
            return iter(list(self._all.values()))

    @property
    def nbytes(self) -> int:
        """The size of all regions together."""
        return self._nbytes

    def _free(self, region: Region) -> None:
        self._on_end(region)
        os.close(region.fd)
        with self._mutex:
            del self._all[region.number]
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
