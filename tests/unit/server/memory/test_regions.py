from __future__ import annotations

import fcntl
import mmap
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.servers import regions_of

from bngrad_kernels.spec import InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.errors import RegionsFullError
from bngrad_server.memory.layout import Place
from bngrad_server.memory.regions import Region, Regions
from bngrad_wire.lease_protocol import ALIGNMENT
from bngrad_wire.limits import REGION_NBYTES

NBYTES = 4096


class Workers:
    """The regions that the workers were told to map."""

    def __init__(self) -> None:
        self.mapped: dict[int, Region] = {}

    def map(self, region: Region) -> None:
        assert region.number not in self.mapped
        self.mapped[region.number] = region

    def unmap(self, region: Region) -> None:
        os.fstat(self.mapped.pop(region.number).fd)  # is still open


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def regions(workers: Workers) -> Iterator[Regions]:
    yield Regions(4 * NBYTES, workers.map, workers.unmap)
    for mapped in workers.mapped.values():
        os.close(mapped.fd)


def location(region: Region, offset: int = 0) -> pb.Location:
    return pb.Location(region_key=region.key, offset=offset)


def test_a_lease_is_memory_that_the_workers_map(regions: Regions, workers: Workers) -> None:
    leases = [regions.lease(NBYTES), regions.lease(2 * NBYTES)]
    assert workers.mapped == {region.number: region for region in leases}
    assert list(regions) == leases
    assert [region.nbytes for region in leases] == [NBYTES, 2 * NBYTES]
    assert [os.fstat(region.fd).st_size for region in leases] == [NBYTES, 2 * NBYTES]
    assert 0 not in workers.mapped  # the arena's number
    assert len({region.key for region in leases}) == 2
    assert {len(region.key) for region in leases} == {16}
    assert regions.nbytes == 3 * NBYTES


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1])
def test_a_client_cannot_change_the_size_of_its_region(regions: Regions, nbytes: int) -> None:
    fd = os.dup(regions.lease(NBYTES).fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with mmap.mmap(fd, NBYTES) as theirs:
        theirs[-1] = 1
    os.close(fd)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, NBYTES), (0, 0), (ALIGNMENT, NBYTES - ALIGNMENT), (NBYTES - ALIGNMENT, ALIGNMENT)]
)
def test_a_place_within_a_region_is_found(regions: Regions, offset: int, nbytes: int) -> None:
    regions.lease(NBYTES)
    region = regions.lease(NBYTES)
    assert regions.hold("x", location(region, offset), nbytes) == (region, Place(region.number, offset))


@pytest.mark.parametrize(
    ("key", "offset", "nbytes", "words"),
    [
        (None, 0, NBYTES + 1, "must end within the region's 4096 bytes, not at 4097"),
        (None, NBYTES, 1, "must end within the region's 4096 bytes, not at 4097"),
        (None, 2**63 - ALIGNMENT, 2**62, "must end within the region's 4096 bytes"),
        (None, 1, 1, "must begin at a multiple of 64 bytes, not at 1"),
        (None, -ALIGNMENT, 1, "must begin at a multiple of 64 bytes, not at -64"),
        (b"", 0, 1, "has the key of no region"),
        (b"0" * 16, 0, 1, "has the key of no region"),
        (b"0" * 2**16, 0, 1, "has the key of no region"),
    ],
)
def test_a_place_that_is_not_there_is_refused(
    regions: Regions, key: bytes | None, offset: int, nbytes: int, words: str
) -> None:
    region = regions.lease(NBYTES)
    place = pb.Location(region_key=region.key if key is None else key, offset=offset)
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        regions.hold("x_backprop_location", place, nbytes)
    assert [violation.field for violation in caught.value.violations] == ["x_backprop_location"]
    assert region.holds == 0


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_region_is_freed_when_its_lease_has_ended_and_no_request_names_it(
    regions: Regions, workers: Workers, ends_first: bool
) -> None:
    region = regions.lease(NBYTES)
    for _ in range(2):
        regions.hold("x", location(region), 1)
    steps = [regions.end, regions.release, regions.release]
    for step in steps if ends_first else steps[::-1]:
        assert region.number in workers.mapped
        assert list(regions) == [region]
        assert regions.nbytes == NBYTES
        os.fstat(region.fd)
        step(region)
    assert not workers.mapped
    regions.collect()
    assert list(regions) == []
    assert regions.nbytes == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region.fd)


def test_a_region_stays_while_it_is_leased(regions: Regions, workers: Workers) -> None:
    region = regions.lease(NBYTES)
    regions.hold("x", location(region), 1)
    regions.release(region)
    assert region.number in workers.mapped
    regions.hold("x", location(region), 1)


def test_a_lease_that_has_ended_admits_no_request(regions: Regions) -> None:
    region = regions.lease(NBYTES)
    regions.hold("x", location(region), 1)
    regions.end(region)
    with pytest.raises(InvalidArgumentError, match="no region that is leased"):
        regions.hold("x", location(region), 1)


def test_leases_beyond_the_limit_are_refused_until_others_end(regions: Regions, workers: Workers) -> None:
    first = regions.lease(3 * NBYTES)
    for nbytes in (NBYTES + 1, 2**63, 2**64 - 1):
        with pytest.raises(RegionsFullError, match=f"{nbytes} bytes is more than is left of the 16384 bytes"):
            regions.lease(nbytes)
    regions.lease(NBYTES)
    regions.end(first)
    regions.lease(3 * NBYTES)
    assert len(workers.mapped) == 2


GREEDY, MODEST = "greedy", "modest"


@pytest.mark.parametrize("nbytes", [REGION_NBYTES // 4, REGION_NBYTES, 2 * REGION_NBYTES])
def test_a_client_cannot_take_more_than_half(nbytes: int) -> None:
    regions = Regions(8 * REGION_NBYTES, lambda region: None, lambda region: None)
    for _ in range(4 * REGION_NBYTES // nbytes):
        regions.lease(nbytes, GREEDY)
    with pytest.raises(RegionsFullError, match="a client may lease at most half of the 536870912 bytes to share"):
        regions.lease(nbytes, GREEDY)
    for _ in range(4):
        regions.lease(REGION_NBYTES, MODEST)
    assert regions.nbytes == 8 * REGION_NBYTES


def test_a_client_cannot_take_more_than_half_of_the_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bngrad_server.memory.regions._MAX_REGIONS", 64)
    regions = Regions(64 * NBYTES, lambda region: None, lambda region: None)
    for _ in range(32):
        regions.lease(1, GREEDY)
    with pytest.raises(RegionsFullError, match="a client may lease at most half of 64 regions"):
        regions.lease(1, GREEDY)
    for _ in range(32):
        regions.lease(1, MODEST)
    assert len(regions) == 64


def test_one_region_is_for_any_client_where_little_is_shared() -> None:
    regions = Regions(REGION_NBYTES, lambda region: None, lambda region: None)
    regions.lease(REGION_NBYTES)
    assert regions.nbytes == REGION_NBYTES


def opened(path: str, flags: int) -> ExitStack:
    stack = ExitStack()
    stack.callback(os.close, os.open(path, flags))
    return stack


WAYS: dict[str, Callable[[int], ExitStack | mmap.mmap]] = {
    "descriptor": lambda fd: opened(f"/proc/self/fd/{fd}", os.O_RDWR),
    "descriptor to read": lambda fd: opened(f"/proc/self/fd/{fd}", os.O_RDONLY),
    "mapping": lambda fd: mmap.mmap(fd, 3 * NBYTES),
    "mapping to read": lambda fd: mmap.mmap(fd, 3 * NBYTES, prot=mmap.PROT_READ),
    "private mapping": lambda fd: mmap.mmap(fd, 3 * NBYTES, flags=mmap.MAP_PRIVATE),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ends_first", [True, False])
def test_memory_that_a_client_keeps_after_its_lease_counts_until_it_is_given_back(
    regions: Regions, workers: Workers, way: str, ends_first: bool
) -> None:
    region = regions.lease(3 * NBYTES)
    with mmap.mmap(region.fd, region.nbytes):  # a worker's mapping does not count
        fd = region.open_for_client()
        with WAYS[way](fd):
            os.close(fd)
            regions.hold("x", location(region), 1)
            steps = [regions.end, regions.release]
            for step in steps if ends_first else steps[::-1]:
                step(region)
            regions.collect()
            assert not workers.mapped
            assert (len(regions), regions.nbytes, regions.kept_nbytes) == (0, 3 * NBYTES, 3 * NBYTES)
            with pytest.raises(RegionsFullError, match="keep the memory of 1 leases that have ended"):
                regions.lease(2 * NBYTES)
        regions.lease(2 * NBYTES)
    assert (regions.nbytes, regions.kept_nbytes) == (2 * NBYTES, 0)


def test_regions_that_clients_keep_are_no_more_than_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bngrad_server.memory.regions._MAX_REGIONS", 2)
    regions = Regions(4 * NBYTES, lambda region: None, lambda region: None)
    with ExitStack() as stack:
        for _ in range(2):
            region = regions.lease(1)
            stack.callback(os.close, region.open_for_client())
            regions.end(region)
        with pytest.raises(RegionsFullError, match="no more than 2 regions are leased at once; clients still keep"):
            regions.lease(1)
    regions.end(regions.lease(1))
    assert regions.nbytes == 0


def test_the_workers_are_told_of_the_end_of_a_region_before_its_file_is_closed() -> None:
    told: list[Region] = []

    def unmap(region: Region) -> None:
        made.collect()  # as another thread may at that moment
        os.fstat(region.fd)
        told.append(region)

    made = Regions(4 * NBYTES, lambda region: None, unmap)
    region = made.lease(NBYTES)
    made.end(region)
    assert told == [region]
    assert made.nbytes == 0


def test_a_path_that_a_client_keeps_open_holds_no_memory(regions: Regions) -> None:
    """Such a descriptor is no open file for the kernel, but the file exists as long as it does."""
    region = regions.lease(NBYTES)
    kept = os.open(f"/proc/self/fd/{region.fd}", os.O_PATH)
    path = f"/proc/self/fd/{kept}"
    try:
        with mmap.mmap(region.fd, NBYTES) as memory:
            memory[:] = b"x" * NBYTES
        assert os.stat(path).st_blocks > 0
        regions.end(region)
        assert regions.nbytes == 0
        assert os.stat(path).st_blocks == 0
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # nothing waits for a lease of the file
    finally:
        os.close(kept)


def test_no_signal_ends_the_process_when_a_region_is_opened_as_it_is_emptied(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []
    for number in (signal.SIGIO, signal.SIGURG):
        signal.signal(number, lambda number, frame: got.append(number))

    def open_it(fd: int, *arguments: int) -> None:
        with pytest.raises(BlockingIOError):
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_NONBLOCK)

    monkeypatch.setattr("bngrad_server.memory.regions._FALLOCATE", open_it)
    try:
        regions.end(regions.lease(NBYTES))
    finally:
        for number in (signal.SIGIO, signal.SIGURG):
            signal.signal(number, signal.SIG_DFL)
    assert got == [signal.SIGURG]  # which is ignored, but for this test


def test_no_other_user_can_open_a_region_a_second_time(regions: Regions) -> None:
    assert stat.S_IMODE(os.fstat(regions.lease(NBYTES).fd).st_mode) == 0o600


@pytest.mark.parametrize("limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE])
def test_a_region_that_cannot_be_made_leaves_nothing(regions: Regions, workers: Workers, limit: int) -> None:
    before = regions_of(os.getpid())  # other tests may have left some to the garbage collector
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (3, hard))  # beyond the standard streams; or that many bytes
    try:
        with pytest.raises(OSError, match=r"File too large|Too many open files"):
            regions.lease(NBYTES)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert (regions.nbytes, workers.mapped) == (0, {})
    assert regions_of(os.getpid()) <= before
