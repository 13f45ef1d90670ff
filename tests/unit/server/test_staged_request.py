"""Where the tensors of a request lie, and what its job says of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.unit.server.workers.additions import NBYTES, inputs, request_of, tensor

from bngrad_kernels.spec import InvalidArgumentError
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_server.codec.ops import OPS, Op
from bngrad_server.codec.request_reader import RequestReader, ahead_header
from bngrad_server.config import ServerConfig
from bngrad_server.engine import Engine
from bngrad_server.errors import UnknownTicketError
from bngrad_server.memory.layout import aligned
from bngrad_server.rpc_context import RpcContext
from bngrad_server.staged_request import StagedRequest
from bngrad_wire.limits import REGION_NBYTES

V3 = next(op for op in OPS if op.name == "FusedBatchNormGradV3")
ONEDNN = next(op for op in OPS if op.name == "BatchNormTrainingBackprop")
RPC = RpcContext("client", None, lambda: False, lambda: None, {})


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(ServerConfig(arena_bytes=2**20, shared_bytes=REGION_NBYTES), lambda: None)
    yield engine
    engine.close()


def stage(
    engine: Engine, message: Any, rpc: RpcContext = RPC, *, op: Op = V3, chunked: bool = False, may_wait: bool = True
) -> StagedRequest:
    request = RequestReader(op, chunked=chunked).read(message.SerializeToString())
    staged = engine.stage(request, rpc, time.monotonic(), may_wait=may_wait)
    assert staged is not None
    return staged


def onednn_request(arrays: dict[str, np.ndarray[Any, Any]]) -> pb.BatchNormTrainingBackpropRequest:
    names = {"output_delta": "y_backprop", "input_forward": "x", "mean": "reserve_space_1"}
    names |= {"variance": "reserve_space_2", "gamma": "scale"}
    tensors: dict[str, Any] = {name: tensor(arrays[other]) for name, other in names.items()}
    return pb.BatchNormTrainingBackpropRequest(epsilon=1, **tensors)


@pytest.mark.parametrize("has_scale", [False, True])
def test_a_job_says_whose_it_is_how_urgent_and_how_large(engine: Engine, has_scale: bool) -> None:
    message = onednn_request(inputs())
    message.priority = 7
    if not has_scale:
        message.ClearField("gamma")
    rpc = RpcContext("alice", time.monotonic() + 60, lambda: True, lambda: None, {})
    with stage(engine, message, rpc, op=ONEDNN) as staged:
        job = staged.new_job()
        assert (job.client, job.priority, job.deadline, job.nbytes) == ("alice", 7, rpc.deadline, 3 * NBYTES)
        assert job.is_abandoned()
        assert job.task.has_scale is has_scale


def test_a_tensor_sent_ahead_takes_no_memory_again(engine: Engine) -> None:
    message = request_of(inputs(), chunked=True)
    plain = stage(engine, message, chunked=True)
    header = ahead_header(message.x)
    message.x.ticket = engine.sent_ahead.receive(header, set(), RPC, lambda memory: None)
    staged = stage(engine, message, chunked=True)
    assert (plain.sent_nbytes, staged.sent_nbytes) == (2 * NBYTES, NBYTES)
    assert plain.block.nbytes - staged.block.nbytes == aligned(NBYTES)
    for each in (plain, staged):
        each.close()


def test_an_unknown_ticket_is_refused_though_no_memory_is_free(engine: Engine) -> None:
    message = request_of(inputs(), chunked=True)
    message.x.ticket = bytes(16)
    while engine.arena.allocate_at_once(2**12, "other") is not None:
        pass
    with pytest.raises(UnknownTicketError):
        stage(engine, message, chunked=True, may_wait=False)


def test_chunks_are_in_the_order_of_the_fields_of_their_tensors(engine: Engine) -> None:
    message = onednn_request(inputs())
    delta, forward = message.output_delta.data, message.input_forward.data
    message.output_delta.data = message.input_forward.data = b""
    with stage(engine, message, op=ONEDNN, chunked=True) as staged:
        staged.copy_from(message.SerializeToString(), [forward, delta])
        assert [bytes(view or b"") for view in staged.large_inputs] == [delta, forward]


@pytest.mark.parametrize(
    ("pixels", "offset", "is_other_region", "overlaps"),
    [(64, 256, False, False), (17, 64, False, True), (64, 0, False, True), (64, 0, True, False)],
    ids=["after it", "over its end", "over it", "in another region"],
)
def test_an_output_is_refused_over_an_input_alone(
    engine: Engine, pixels: int, offset: int, is_other_region: bool, overlaps: bool
) -> None:
    """Whose tensor has a float32 for each pixel."""
    regions = [engine.regions.lease(4096) for _ in range(2)]
    message = request_of(inputs(shape=(1, 1, pixels, 1)))
    message.x.ClearField("data")
    message.x.location.region_key = regions[0].key
    message.x_backprop_location.region_key = regions[is_other_region].key
    message.x_backprop_location.offset = offset
    if overlaps:
        with pytest.raises(InvalidArgumentError, match="x_backprop_location must not overlap x"):
            stage(engine, message)
    else:
        stage(engine, message).close()
    assert not any(region.holds for region in regions)
    for region in regions:
        engine.regions.end(region)
