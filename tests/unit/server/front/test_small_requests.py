"""Which requests the front process computes without a worker."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.server.workers.additions import inputs, request_of

from bngrad_kernels.spec import Spec
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS
from bngrad_server.codec.request import Request
from bngrad_server.codec.request_reader import RequestReader
from bngrad_server.front.kernels import FrontKernels
from bngrad_server.front.small_requests import SmallRequests


class AllKernels(FrontKernels):
    def has(self, spec: Spec) -> bool:
        return True


def read(message: Any) -> Request:
    (op,) = (op for op in OPS if op.name == "FusedBatchNormGradV3")
    return RequestReader(op, chunked=False).read(message.SerializeToString())


def test_requests_are_small_up_to_a_size() -> None:
    request = read(request_of(inputs()))
    sizes = [SmallRequests(AllKernels(1), request.tensors_nbytes - less).takes(request) for less in (0, 1)]
    assert sizes == [True, False]


def test_empty_requests_and_those_in_shared_memory_go_another_way() -> None:
    empty, shared = request_of(inputs(shape=(0, 8, 8, 4))), request_of(inputs())
    for number, tensor in enumerate((shared.x, shared.y_backprop)):
        tensor.ClearField("data")
        tensor.location.CopyFrom(pb.Location(region_key=bytes(16), offset=number * 2**16))
    small = SmallRequests(AllKernels(1), 2**20)
    assert not small.takes(read(empty))
    assert not small.takes(read(shared))


def test_without_the_kernel_a_request_goes_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllKernels, "has", lambda kernels, spec: False)
    assert not SmallRequests(AllKernels(1), 2**20).takes(read(request_of(inputs())))
