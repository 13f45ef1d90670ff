"""Memory that clients on this host share with the workers.

A region is an anonymous file, sealed against shrinking, so that no client can take memory away while a worker uses it.
It is leased for the life of a connection to a Unix socket, over which its descriptor is sent: when the client ends, in
whatever way, so does the lease. A region is freed once its lease has ended and no request names it.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import resource
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bngrad_kernels.spec import FieldViolation, InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.errors import RegionsFullError
from bngrad_server.memory.layout import Place
from bngrad_wire.lease_protocol import ALIGNMENT, KEY_NBYTES
from bngrad_wire.limits import REGION_NBYTES

logger = logging.getLogger(__name__)

_FALLOCATE = ctypes.CDLL(None).fallocate
_FALLOCATE.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_MAX_REGIONS = 1024
_DESCRIPTOR_FRACTION = 8
"""At most one region for this many descriptors that the process may have; each takes two, with its connection."""
_ALWAYS_REGIONS = 16
"""How many regions any client may lease, even if that is more than half."""


@dataclass(eq=False, slots=True)
class Region:
    """A region that is leased, that requests still name, or that its client has kept.

    Attributes:
        number: The number by which tasks name it.
        key: Random bytes by which the one client that leases it names it.
        fd: Its file descriptor, for this process and the workers.
        nbytes: Its size.
        client: The client that leases it.
        holds: How many requests name it.
        leased: Whether its lease lasts.
    """

    number: int
    key: bytes
    fd: int
    nbytes: int
    client: str
    holds: int = 0
    leased: bool = True

    def open_for_client(self) -> int:
        """Returns another open file of the same memory, so that the kernel can tell the client's use from our own.

        Raises:
            OSError: No descriptor is left.
        """
        return _reopened(self.fd)


class Regions:
    """All regions."""

    def __init__(self, max_nbytes: int, on_begin: Callable[[Region], None], on_end: Callable[[Region], None]) -> None:
        """Calls ``on_end`` with each region that is no longer leased nor named by requests, before closing its file."""
        self._max_nbytes = max_nbytes
        self._on_begin = on_begin
        self._on_end = on_end
        self._mutex = threading.Lock()
        self._by_key: dict[bytes, Region] = {}  # those that are leased
        self._all: dict[int, Region] = {}
        self._kept: list[Region] = []  # those neither leased nor named by requests, until `collect` frees them
        self._collecting = threading.Lock()
        self._max_regions = min(_MAX_REGIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTOR_FRACTION)
        self._last_number = 0
        self._nbytes = 0

    def lease(self, nbytes: int, client: str = "") -> Region:
        """Makes a region, and leases it to a client until `end`.

        Raises:
            RegionsFullError: There would be too many bytes, or too many regions, in all or of this client.
            OSError: The system cannot make its file.
        """
        if self._reason_to_refuse(nbytes, client) is not None:
            self.collect()
        with self._mutex:
            reason = self._reason_to_refuse(nbytes, client)
            if reason is not None:
                raise RegionsFullError(reason)
            fd = _sealed_file(nbytes)
            self._nbytes += nbytes
            self._last_number += 1
            number = self._last_number
        region = Region(number, secrets.token_bytes(KEY_NBYTES), fd, nbytes, client)
        self._on_begin(region)
        with self._mutex:
            self._by_key[region.key] = self._all[number] = region
        return region

    def end(self, region: Region) -> None:
        """Ends a lease, and frees the region unless requests name it or its client keeps it."""
        with self._mutex:
            region.leased = False
            del self._by_key[region.key]
            is_last = region.holds == 0
        if is_last:
            self._retire(region)
            self.collect()

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
        """Undoes one `hold`; if that was the last and its lease has ended, the next `collect` frees the region."""
        with self._mutex:
            region.holds -= 1
            is_last = region.holds == 0 and not region.leased
        if is_last:
            self._retire(region)

    def collect(self) -> None:
        """Frees the regions that are neither leased nor named by requests, except those that their clients keep."""
        with self._collecting:  # which may take long, so without the other lock
            for region in list(self._kept):
                if _take_back(region):
                    os.close(region.fd)
                    with self._mutex:
                        self._kept.remove(region)
                        del self._all[region.number]
                        self._nbytes -= region.nbytes

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

    @property
    def kept_nbytes(self) -> int:
        """The size of the regions that clients have kept after their leases."""
        with self._mutex:
            return sum(region.nbytes for region in self._kept)

    def _reason_to_refuse(self, nbytes: int, client: str) -> str | None:
        own = [region.nbytes for region in list(self._all.values()) if region.client == client]
        reason = None
        if len(self._all) >= self._max_regions:
            reason = f"no more than {self._max_regions} regions are leased at once"
        elif self._nbytes + nbytes > self._max_nbytes:
            reason = f"a region of {nbytes} bytes is more than is left of the {self._max_nbytes} bytes to share"
        elif sum(own) + nbytes > max(self._max_nbytes // 2, REGION_NBYTES):
            reason = f"a client may lease at most half of the {self._max_nbytes} bytes to share"
        elif len(own) >= max(self._max_regions // 2, _ALWAYS_REGIONS):
            reason = f"a client may lease at most half of {self._max_regions} regions"
        if reason is not None and self._kept:
            reason += f"; clients still keep the memory of {len(self._kept)} leases that have ended"
        return reason

    def _retire(self, region: Region) -> None:
        """Has the workers unmap a region that no request names now; `collect` frees it."""
        self._on_end(region)
        with self._mutex:
            self._kept.append(region)


def _take_back(region: Region) -> bool:
    """Empties a region that only this process and its workers have open or mapped; returns False for another one."""
    try:
        # The kernel grants this if no other open file exists, mappings included. Opening it would then raise a signal,
        # SIGIO unless another one is named, which would end the process; SIGURG is ignored.
        fcntl.fcntl(region.fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(region.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("memory that clients keep after their leases is not counted: %s", error)
        return True
    # A file opened by O_PATH does not count, but would keep the pages.
    _FALLOCATE(region.fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, 0, region.nbytes)
    fcntl.fcntl(region.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # workers may have the file open for a moment
    return True


def _sealed_file(nbytes: int) -> int:
    made = os.memfd_create("bngrad-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(made, 0o600)  # a client of another user can open it no second time
        os.ftruncate(made, nbytes)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return _reopened(made)  # the kernel does not count the first one for leases of files
    finally:
        os.close(made)


def _reopened(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
