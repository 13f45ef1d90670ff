"""Errors that a server returns for invalid requests, to any client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tests.hostile_messages import HOSTILE, sized
from tests.integration.status_details import violations
from tests.raw_http2 import path_of, request
from tests.servers import DEVICE, targets_of

import bngrad
from bngrad._requests import attributes
from bngrad_cli.embedded import EmbeddedServer
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc

Request = pb.FusedBatchNormGradV3Request
FLOAT = pb.DATA_TYPE_FLOAT32
TENSOR = pb.Tensor(dtype=FLOAT, shape=[2, 3, 3, 4], data=bytes(288))
STATS = pb.Tensor(dtype=FLOAT, shape=[4], data=bytes(16))
UNKNOWN: Any = 99
INPUTS: dict[str, Any] = {
    **dict.fromkeys(("y_backprop", "x"), TENSOR),
    **dict.fromkeys(("scale", "reserve_space_1", "reserve_space_2"), STATS),
}


@pytest.fixture(scope="module")
def stub(server: EmbeddedServer) -> Iterator[pb_grpc.BatchNormGradServiceStub]:
    with grpc.insecure_channel(server.target) as channel:
        yield pb_grpc.BatchNormGradServiceStub(channel)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Request(), {name: f"{name} must be given" for name in INPUTS}),
        (
            Request(**INPUTS | {"x": pb.Tensor(shape=[2, 3, 3, 4], data=bytes(288))}),
            {
                "x": "x must have one of the dtypes DATA_TYPE_FLOAT16, DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT32, "
                "not DATA_TYPE_UNSPECIFIED"
            },
        ),
        (
            Request(**INPUTS | {"x": pb.Tensor(dtype=UNKNOWN)}),
            {"x": "x must have one of the dtypes DATA_TYPE_FLOAT16, DATA_TYPE_BFLOAT16, DATA_TYPE_FLOAT32, not 99"},
        ),
        (
            Request(**INPUTS, reserve_space_2_kind=UNKNOWN),
            {"reserve_space_2_kind": "reserve_space_2_kind must be a known ReserveSpace2Kind, not 99"},
        ),
        (
            Request(**INPUTS, data_format="NDHWC", epsilon=-1),
            {
                "x": "x must be 5-dimensional for data_format NDHWC, not (2, 3, 3, 4)",
                "epsilon": "epsilon must be finite and not negative in float32, not -1.0",
            },
        ),
        (
            Request(**INPUTS | {"scale": pb.Tensor(dtype=FLOAT, shape=[4], data=bytes(15))}),
            {"scale": "scale must have 16 bytes of data for shape (4,) and dtype float32, not 15"},
        ),
        (
            Request(**INPUTS | {"x": pb.Tensor(dtype=FLOAT, shape=[2**62, 2**62, -1, 4])}),
            {
                "x": "x must have no negative dimension, not shape (4611686018427387904, 4611686018427387904, -1, 4)",
                "y_backprop": "x and y_backprop must have same shape, but x has shape (4611686018427387904, "
                "4611686018427387904, -1, 4) and y_backprop has shape (2, 3, 3, 4)",
            },
        ),
    ],
)
def test_every_violation_is_named(
    stub: pb_grpc.BatchNormGradServiceStub, message: pb.FusedBatchNormGradV3Request, expected: dict[str, str]
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub.FusedBatchNormGradV3(message)
    assert violations(refused.value) == expected


def test_the_onednn_op_needs_an_epsilon(stub: pb_grpc.BatchNormGradServiceStub) -> None:
    message = pb.BatchNormTrainingBackpropRequest(input_forward=TENSOR, output_delta=TENSOR, mean=STATS, variance=STATS)
    with pytest.raises(grpc.RpcError) as refused:
        stub.BatchNormTrainingBackprop(message)
    assert violations(refused.value) == {"epsilon": "epsilon must be given: it has no default"}


def test_the_contents_of_reserve_space_3_are_ignored(stub: pb_grpc.BatchNormGradServiceStub) -> None:
    expected = stub.FusedBatchNormGradV3(Request(**INPUTS))
    for tensor in (
        pb.Tensor(dtype=FLOAT, shape=[3], data=b"\xff" * 12),
        pb.Tensor(dtype=FLOAT, shape=[1000, 1000]),
        pb.Tensor(dtype=FLOAT),
    ):
        assert stub.FusedBatchNormGradV3(Request(**INPUTS, reserve_space_3=tensor)) == expected


def test_absent_attributes_mean_the_ops_defaults(stub: pb_grpc.BatchNormGradServiceStub) -> None:
    explicit = Request(**INPUTS, epsilon=1e-4, data_format="NHWC", is_training=True)
    assert stub.FusedBatchNormGradV3(Request(**INPUTS)) == stub.FusedBatchNormGradV3(explicit)


@pytest.mark.parametrize("garbage", [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a"])
def test_garbage_is_refused_and_other_calls_go_on(server: EmbeddedServer, garbage: bytes) -> None:
    with grpc.insecure_channel(server.target) as channel:
        call: Any = channel.unary_unary("/bngrad.v1.BatchNormGradService/FusedBatchNormGradV3")
        with pytest.raises(grpc.RpcError):
            call(garbage)
        pb_grpc.BatchNormGradServiceStub(channel).FusedBatchNormGradV3(Request(**INPUTS))


def test_the_client_raises_violations(client: bngrad.Client) -> None:
    tensor, stats = np.zeros((2, 3, 3, 4), np.float32), np.zeros(4, np.float32)
    inputs: list[Any] = [tensor, tensor, stats[:3], stats, stats[:2]]
    with pytest.raises(bngrad.InvalidArgumentError) as refused:
        client.fused_batch_norm_grad_v2(*inputs)
    assert [violation.field for violation in refused.value.violations] == ["scale", "reserve_space_2"]
    assert "scale must have the same number of elements as the channels of x, got 3 and 4" in str(refused.value)


@pytest.mark.parametrize("value", ["NHWC" * 10_000, "\U0001f600" * 1000])
def test_an_error_message_fits_into_the_trailers_that_clients_accept(
    client: bngrad.Client, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger trailers would end their connections, and the calls would be retried."""
    monkeypatch.setattr(attributes, "_LONGEST_NAME", len(value))  # the server must refuse it, too
    tensor, stats = np.zeros((2, 3, 3, 4), np.float32), np.zeros(4, np.float32)
    with pytest.raises(bngrad.InvalidArgumentError, match=r"must be one of NHWC, NCHW, not '.+") as refused:
        client.fused_batch_norm_grad_v2(tensor, tensor, stats[:3], stats[:3], stats[:3], data_format=value)
    (violation,) = refused.value.violations
    assert violation.description.endswith("...")


def test_long_shapes_are_shortened_in_messages(stub: pb_grpc.BatchNormGradServiceStub) -> None:
    tensors: dict[str, Any] = {
        name: pb.Tensor(dtype=FLOAT, shape=[2**62 + i] * 32, data=bytes(4)) for i, name in enumerate(INPUTS)
    }
    with pytest.raises(grpc.RpcError) as refused:
        stub.FusedBatchNormGradV3(Request(**tensors, data_format="NHWC"))
    assert violations(refused.value).keys() == INPUTS.keys()


@pytest.mark.parametrize(
    "content", ["unknown varints", "empty tensors", "nested groups", "a packed shape", "a long key"]
)
@pytest.mark.parametrize("door", ["tcp", "local"])
def test_no_message_takes_more_of_the_server_than_its_own_size(server: EmbeddedServer, door: str, content: str) -> None:
    """Bounds are ten times what it should take, and less than one such message took when all its fields were read."""
    message = HOSTILE[content](8 * 2**20)
    begun = pb.ExchangeRequest(fused_batch_norm_grad_v2=request(4096, whole=False)).SerializeToString()
    limit = "must have at most (16 fields|256 fields|65536 bytes)|a chunk must follow, not fused_batch_norm_grad_v3"
    front = psutil.Process(server.process.pid)
    with grpc.insecure_channel(targets_of(server.target)[door]) as channel:
        unary: Any = channel.unary_unary(path_of("FusedBatchNormGradV3"))
        exchange: Any = channel.stream_stream(path_of("Exchange"))
        before, most_before = sum(front.cpu_times()[:2]), peak_nbytes(front, reset=True)
        for call in (
            lambda: unary(message),
            lambda: list(exchange(iter([sized(1, message)]))),
            lambda: list(exchange(iter([begun, message]))),
        ):
            with pytest.raises(grpc.RpcError, match=limit) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sum(front.cpu_times()[:2]) - before < 3
    assert peak_nbytes(front) - most_before < 400 * 2**20


def peak_nbytes(process: psutil.Process, *, reset: bool = False) -> int:
    """Returns the most memory that a process had since it began, or since the last reset."""
    folder = Path(f"/proc/{process.pid}")
    if reset:
        (folder / "clear_refs").write_text("5")
    (line,) = (line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_a_request_larger_than_the_arena_is_refused() -> None:
    tensor, stats = np.zeros((2**15, 4), np.float32), np.zeros(4, np.float32)
    options = ("--arena-bytes", "1MiB", "--shared-bytes", "0")
    with EmbeddedServer(device=DEVICE, options=options) as server, bngrad.Client(server.target) as client:
        with pytest.raises(bngrad.ResourceExhaustedError, match=r"needs \d+ bytes of memory for tensors, and the"):
            client.batch_norm_training_backprop(tensor, tensor, stats, stats, epsilon=1e-3)
        small = tensor[:1]
        client.batch_norm_training_backprop(small, small, stats, stats, epsilon=1e-3)
