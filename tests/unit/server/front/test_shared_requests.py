from __future__ import annotations

import gc
import math
import os
import resource
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
from tests.clock import Clock
from tests.servers import regions_of, wait_until

from bngrad_kernels import backends
from bngrad_kernels.problem import Problem
from bngrad_kernels.spec import FLOAT32, InvalidArgumentError, Spec
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS
from bngrad_server.codec.request import Request
from bngrad_server.codec.request_reader import RequestReader
from bngrad_server.errors import ComputeError
from bngrad_server.front import shared_requests
from bngrad_server.front.kernels import FrontKernels
from bngrad_server.front.prepared import Prepared
from bngrad_server.front.shared_requests import SharedRequests
from bngrad_server.memory.regions import Region, Regions
from bngrad_server.runtime.event_loop import EventLoop

BRIEF_NBYTES = 16384
REGION_NBYTES = 2**32
"""Of which only what is written takes memory."""
SMALL, BRIEF, LONG, TOO_LARGE = ((1, 1, pixels, 4) for pixels in (64, 256, 1024, 2**17))
"""Tensors of 1 KiB, 4 KiB, 16 KiB and 2 MiB."""
MANY_CHANNELS, EMPTY = (1, 1, 1, 4096), (0, 8, 8, 4)
OP = next(op for op in OPS if op.name == "FusedBatchNormGradV2")
FIELDS = "y_backprop", "x", "x_backprop_location"


@pytest.fixture(scope="module")
def kernels() -> FrontKernels:
    backends.create("cpu", threads=1).warm_up()  # compiles the kernel unless the cache has it
    kernels = FrontKernels(threads=2)
    wait_until(lambda: kernels.has(Spec(FLOAT32, SMALL, 3)))
    return kernels


class Server:
    """What computes requests in shared memory, and what it asks."""

    def __init__(self, kernels: FrontKernels) -> None:
        self.is_idle, self.loop = True, EventLoop("test")
        self.regions = Regions(2 * REGION_NBYTES, lambda region: None, self.end)
        self.requests = SharedRequests(kernels, self.regions, BRIEF_NBYTES, lambda: self.is_idle)
        self.requests.event_loop = self.loop
        self.region = self.regions.lease(REGION_NBYTES)
        self._reader = RequestReader(OP, chunked=False)

    def end(self, region: Region) -> None:
        self.requests.forget(region)

    def message(self, shape: tuple[int, ...], offsets: tuple[int, ...] | None = None) -> bytes:
        nbytes = FLOAT32.itemsize * math.prod(shape)
        places = [
            pb.Location(region_key=self.region.key, offset=offset) for offset in offsets or (0, nbytes, 2 * nbytes)
        ]
        large = [pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=shape, location=place) for place in places[:2]]
        data = np.arange(1, 1 + shape[-1], dtype=np.float32).tobytes()
        small = pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=shape[-1:], data=data)
        return pb.FusedBatchNormGradV2Request(
            y_backprop=large[0], x=large[1], scale=small, reserve_space_1=small, reserve_space_2=small,
            x_backprop_location=places[2],
        ).SerializeToString()  # fmt: skip

    def read(self, message: bytes) -> Request:
        return self._reader.read(message)

    def takes(self, shape: tuple[int, ...]) -> bool:
        return self.requests.takes(self.read(self.message(shape)))

    def compute(self, shape: tuple[int, ...]) -> list[bytes]:
        message = self.message(shape)
        assert self.requests.takes(self.read(message))
        return self.requests.compute(self.read(message), message)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shared_requests, "time", clock)
    return clock


@pytest.fixture
def server(kernels: FrontKernels) -> Iterator[Server]:
    server = Server(kernels)
    yield server
    for region in server.regions:
        os.close(region.fd)


def test_a_request_is_computed_where_its_tensors_lie(server: Server) -> None:
    rng = np.random.default_rng(0)
    tensors = rng.normal(size=(2, *LONG)).astype(np.float32)
    os.pwrite(server.region.fd, tensors.tobytes(), 0)
    response = pb.FusedBatchNormGradV2Response.FromString(*server.compute(LONG))
    vectors = np.arange(1, 5, dtype=np.float32)[None].repeat(3, 0)
    expected = Problem.allocate(server.read(server.message(LONG)).spec, *tensors, *vectors)
    backends.create("cpu", threads=1).run([expected])
    nbytes = expected.x_backprop.nbytes
    assert os.pread(server.region.fd, nbytes, 2 * nbytes) == expected.x_backprop.tobytes()
    assert response.scale_backprop.data == expected.scale_backprop.tobytes()
    assert response.offset_backprop.data == expected.offset_backprop.tobytes()


def test_a_region_that_cannot_be_mapped_is_a_memory_error(server: Server) -> None:
    gc.collect()  # servers of other tests, or the collector might unmap their regions in between
    limits = resource.getrlimit(resource.RLIMIT_AS)
    # Much more than other threads may free meanwhile, or need.
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + server.region.nbytes // 2, limits[1]))
    try:
        with pytest.raises(MemoryError, match=f"{REGION_NBYTES} bytes of shared memory cannot be mapped"):
            server.compute(SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert server.region.holds == 0
    server.compute(SMALL)


def test_only_brief_requests_are_computed_while_others_are_in_the_server(server: Server) -> None:
    assert all(map(server.takes, (SMALL, BRIEF, LONG)))
    server.is_idle = False
    assert [server.takes(shape) for shape in (SMALL, BRIEF, LONG)] == [True, True, False]


def test_brief_requests_have_a_part_of_each_round(server: Server, clock: Clock) -> None:
    clock.tick_s = shared_requests._ROUND_S * 0.6
    for _ in range(2):
        server.loop.rounds += 1
        for _ in range(4):
            server.compute(SMALL)
        server.compute(BRIEF)
        assert server.takes(BRIEF)
        server.compute(BRIEF)
        assert [server.takes(shape) for shape in (SMALL, BRIEF)] == [True, False]


@pytest.mark.parametrize("shape", [TOO_LARGE, MANY_CHANNELS, EMPTY], ids=["large", "of many channels", "empty"])
def test_some_are_never_computed(server: Server, shape: tuple[int, ...]) -> None:
    assert not server.takes(shape)


def test_a_request_whose_kernel_is_not_loaded_goes_to_workers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.requests, "_kernels", FrontKernels(threads=1))
    assert not server.takes(SMALL)


def test_a_kernel_that_fails_fails_its_request(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrontKernels, "bound", mock.Mock(return_value=mock.Mock(side_effect=FloatingPointError)))
    with pytest.raises(ComputeError, match="FloatingPointError"):
        server.compute(SMALL)


def test_after_others_have_waited_for_a_long_one_workers_compute_the_next_for_a_while(
    server: Server, clock: Clock
) -> None:
    server.compute(LONG)
    server.loop.call_soon(lambda: None)
    server.compute(BRIEF)
    assert server.takes(LONG)
    server.compute(LONG)
    assert not server.takes(LONG)
    assert server.takes(BRIEF)
    clock.now += shared_requests._CROWDED_S
    assert server.takes(LONG)


@pytest.mark.parametrize(("channels", "most"), [(4, 9), (768, 4)])
def test_what_is_kept_of_requests_takes_limited_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch, channels: int, most: int
) -> None:
    monkeypatch.setattr(shared_requests, "_MAX_KNOWN_NBYTES", 10 * shared_requests._KNOWN_NBYTES)
    of_other_tests = prepared()
    for rows in range(1, 27):
        server.loop.rounds += 1
        server.compute((1, rows, 4, channels))
        assert len(prepared()) - len(of_other_tests) <= most  # this test keeps those
    assert len(prepared()) - len(of_other_tests) > 1


def prepared() -> list[Prepared]:
    return [each for each in gc.get_objects() if type(each) is Prepared]


def test_a_region_whose_lease_has_ended_is_no_longer_mapped(server: Server) -> None:
    before = regions_of(os.getpid())
    server.compute(SMALL)
    server.regions.end(server.region)
    assert regions_of(os.getpid()) < before


@pytest.mark.parametrize("is_held", [False, True], ids=["alone", "while a worker uses them"])
def test_places_are_checked_again_once_a_lease_has_ended(server: Server, is_held: bool) -> None:
    message = server.message(SMALL)
    server.compute(SMALL)
    if is_held:
        server.regions.hold("x", pb.Location(region_key=server.region.key), nbytes=1)
    server.regions.end(server.region)
    with pytest.raises(InvalidArgumentError, match="the key of no region that is leased"):
        server.requests.compute(server.read(message), message)


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [
        ((0, 1024, 1024), "must not overlap x"),
        ((REGION_NBYTES, 0, 1024), "the location of y_backprop must end within the region"),
        ((0, REGION_NBYTES, 1024), "the location of x must end within the region"),
        ((0, 1024, REGION_NBYTES), "the location of x_backprop_location must end within the region"),
    ],
)
def test_places_are_refused_as_workers_would_never_see_them(
    server: Server, offsets: tuple[int, ...], problem: str
) -> None:
    message = server.message(SMALL, offsets)
    for _ in range(2):
        assert server.requests.takes(server.read(message))
        with pytest.raises(InvalidArgumentError, match=problem):
            server.requests.compute(server.read(message), message)
    assert all(region.holds == 0 for region in server.regions)


def test_tensors_that_are_in_the_message_go_to_workers(server: Server) -> None:
    request: Any = pb.FusedBatchNormGradV2Request.FromString(server.message(SMALL))
    request.x.ClearField("location")
    request.x.data = bytes(1024)
    assert not server.requests.takes(server.read(request.SerializeToString()))


def test_outputs_that_are_to_be_in_the_response_come_from_workers(server: Server) -> None:
    request: Any = pb.FusedBatchNormGradV2Request.FromString(server.message(SMALL))
    request.ClearField("x_backprop_location")
    assert not server.requests.takes(server.read(request.SerializeToString()))
