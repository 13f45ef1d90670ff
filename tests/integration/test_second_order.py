"""The second-order op through a server, over every transport: the bits of the kernel in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.second_order import CASES, arguments, assert_within_bounds, inputs_of, spec_of
from tests.integration.status_details import violations
from tests.servers import DEVICE, ONE_WORKER, Transport, targets_of

import bngrad
import bngrad.aio
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels import backends
from bngrad_kernels.backend import Backend
from bngrad_kernels.problem import Array, GradGradProblem
from bngrad_kernels.spec import BFLOAT16, FLOAT16, FLOAT32, Spec
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_protos.v1 import batch_norm_grad_pb2_grpc as pb_grpc

DTYPES = [FLOAT16, BFLOAT16, FLOAT32]
NAMES = GradGradProblem.large_inputs + GradGradProblem.small_inputs


@functools.cache
def backend() -> Backend:
    made = backends.create(DEVICE)
    made.warm_up()
    return made


@functools.cache
def expected(spec: Spec) -> tuple[Array, Array, Array]:
    problem = GradGradProblem.allocate(spec, **inputs_of(spec))
    backend().run([problem])
    return problem.grad_y_backprop, problem.grad_x, problem.grad_scale


def assert_same_bits(spec: Spec, outputs: tuple[Array, ...]) -> None:
    for ours, theirs in zip(outputs, expected(spec), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_every_transport_gives_the_kernels_bits(client: bngrad.Client, case: str, is_training: bool) -> None:
    for dtype in DTYPES:
        spec = spec_of(case, dtype, is_training=is_training)
        outputs = client.fused_batch_norm_grad_grad(
            **inputs_of(spec), **arguments(case), is_training=is_training, reserve_space_2_kind="variance"
        )
        assert outputs._fields == ("grad_y_backprop", "grad_x", "grad_scale")
        assert_same_bits(spec, outputs)


@pytest.mark.parametrize("case", ["NHWC", "NCHW large"])
async def test_the_asynchronous_client_gives_the_same_bits(target: str, transport: Transport, case: str) -> None:
    spec = spec_of(case)
    async with bngrad.aio.Client(target, transport=transport) as client:
        assert_same_bits(spec, await client.fused_batch_norm_grad_grad(**inputs_of(spec), **arguments(case)))


OUTS: dict[str, Callable[[bngrad.Client, tuple[int, ...]], tuple[Array | None, Array | None]]] = {
    "ordinary": lambda client, shape: (np.empty(shape, np.float32), np.empty(shape, np.float32)),
    "one": lambda client, shape: (None, np.empty(shape, np.float32)),
    "shared": lambda client, shape: (client.empty(shape), client.empty(shape)),
    "neighbours in one array": lambda client, shape: tuple(client.empty((2, *shape))),
    "one shared, one strided": lambda client, shape: (client.empty(shape), np.empty(shape, np.float32, order="F")),
}


@pytest.mark.parametrize("out_kind", OUTS)
@pytest.mark.parametrize("case", ["NHWC", "NHWC large"])
def test_outputs_are_written_to_the_arrays_given(client: bngrad.Client, case: str, out_kind: str) -> None:
    spec = spec_of(case)
    arrays = dict(inputs_of(spec))
    for name in ("grad_x_backprop", "x"):
        arrays[name] = client.empty(spec.shape)
        arrays[name][...] = inputs_of(spec)[name]
    out = OUTS[out_kind](client, spec.shape)
    outputs = client.fused_batch_norm_grad_grad(**arrays, **arguments(case), out=out)
    assert_same_bits(spec, outputs)
    assert all(wanted is None or wanted is given for wanted, given in zip(out, outputs, strict=False))


def test_the_gradients_are_those_of_the_first_orders_outputs(client: bngrad.Client) -> None:
    """Compares with finite differences of first-order gradients that the server computes."""
    spec = spec_of("NHWC", is_training=False)
    arrays = inputs_of(spec)
    outputs = client.fused_batch_norm_grad_grad(**arrays, **arguments("NHWC"), is_training=False)

    def loss(y_backprop: Array, x: Array, scale: Array) -> float:
        reserves = arrays["reserve_space_1"], arrays["reserve_space_2"]
        first = client.fused_batch_norm_grad_v2(y_backprop, x, scale, *reserves, **arguments("NHWC"), is_training=False)
        cotangents = (arrays[name] for name in ("grad_x_backprop", "grad_scale_backprop", "grad_offset_backprop"))
        return sum(
            float((a.astype(np.float64) * b.astype(np.float64)).sum())
            for a, b in zip(first[:3], cotangents, strict=True)
        )

    points = [arrays[name] for name in ("y_backprop", "x", "scale")]
    rng = np.random.default_rng(1)
    for i, gradient in enumerate(outputs):
        direction = rng.choice([-0.5, 0.5], points[i].shape).astype(np.float32)
        moved = [[point + sign * direction if i == j else point for j, point in enumerate(points)] for sign in (1, -1)]
        # The loss is linear in each of them, so a large step is exact.
        difference = (loss(*moved[0]) - loss(*moved[1])) / 2
        slope = float((gradient.astype(np.float64) * direction).sum())
        assert abs(difference - slope) <= 1e-4 * float(np.abs(gradient * direction).sum())


def test_errors_are_within_their_bounds_through_the_server(client: bngrad.Client) -> None:
    for dtype in DTYPES:
        spec = spec_of("NCHW", dtype)
        outputs = client.fused_batch_norm_grad_grad(**inputs_of(spec), **arguments("NCHW"))
        assert_within_bounds(spec, outputs)


@pytest.mark.parametrize("where", ["tcp", "local"])
def test_the_stock_client_exchanges_three_tensors_for_two(server: EmbeddedServer, where: str) -> None:
    spec = spec_of("NHWC")
    arrays = inputs_of(spec)
    tensors: dict[str, Any] = {
        name: pb.Tensor(dtype=pb.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes() if array.ndim == 1 else b"")
        for name, array in arrays.items()
    }
    header = pb.FusedBatchNormGradGradRequest(**tensors, epsilon=0.01)
    messages = [pb.ExchangeRequest(fused_batch_norm_grad_grad=header)]
    messages += [pb.ExchangeRequest(chunk=arrays[name].tobytes()) for name in GradGradProblem.large_inputs]
    with grpc.insecure_channel(targets_of(server.target)[where]) as channel:
        answer, *chunks = pb_grpc.BatchNormGradServiceStub(channel).Exchange(iter(2 * messages))
    half = len(chunks) // 2
    assert chunks[half].fused_batch_norm_grad_grad == answer.fused_batch_norm_grad_grad
    data = b"".join(each.chunk for each in chunks[:half])
    grad_scale = answer.fused_batch_norm_grad_grad.grad_scale.data
    grad_y_backprop, grad_x = np.frombuffer(data, np.float32).reshape(2, *spec.shape)
    assert_same_bits(spec, (grad_y_backprop, grad_x, np.frombuffer(grad_scale, np.float32)))


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"grad_x_backprop": np.ones((4, 5, 6, 8), np.float32)}, "grad_x_backprop", "must have same shape"),
        ({"grad_x_backprop": np.ones((4, 5, 6, 7), np.float16)}, "grad_x_backprop", "float16"),
        ({"grad_scale_backprop": np.ones(6, np.float32)}, "grad_scale_backprop", "same number of elements"),
        ({"grad_offset_backprop": np.ones((1, 7), np.float32)}, "grad_offset_backprop", "1-dimensional"),
        ({"data_format": "NXC"}, "data_format", "must be one of NHWC, NCHW, NDHWC, NCDHW"),
    ],
)
def test_bad_input_is_named_by_its_field(
    client: bngrad.Client, changes: dict[str, Any], field: str, words: str
) -> None:
    spec = spec_of("NHWC")
    with pytest.raises(bngrad.InvalidArgumentError) as refused:
        client.fused_batch_norm_grad_grad(**{**inputs_of(spec), **arguments("NHWC"), **changes})
    (violation,) = refused.value.violations
    assert violation.field == field
    assert words in violation.description


def test_both_orders_share_a_worker_without_changing_each_others_bits() -> None:
    spec = spec_of("NHWC")
    arrays = inputs_of(spec)
    first: Any = [arrays[name] for name in ("y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2")]
    with EmbeddedServer(device=DEVICE, options=ONE_WORKER) as server, bngrad.Client(server.target) as client:
        before = client.fused_batch_norm_grad_v2(*first)
        for _ in range(20):
            assert_same_bits(spec, client.fused_batch_norm_grad_grad(**arrays, **arguments("NHWC")))
            for ours, theirs in zip(client.fused_batch_norm_grad_v2(*first), before, strict=True):
                assert ours.tobytes() == theirs.tobytes()
        assert client.server_info().ops[-1] == "FusedBatchNormGradGrad"


def test_an_output_may_not_lie_over_an_input(server: EmbeddedServer) -> None:
    with bngrad.Client(server.target, transport="shared") as client:
        both = client.empty((2, 4, 5, 6, 7))
        spec = spec_of("NHWC")
        with pytest.raises(bngrad.InvalidArgumentError, match=r"out\[1\] must not overlap x"):
            client.fused_batch_norm_grad_grad(
                **{**inputs_of(spec), "x": both[0]}, **arguments("NHWC"), out=(both[1], both[0])
            )


def test_the_stock_clients_violations_name_the_fields(server: EmbeddedServer) -> None:
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as refused:
        pb_grpc.BatchNormGradServiceStub(channel).FusedBatchNormGradGrad(pb.FusedBatchNormGradGradRequest())
    assert violations(refused.value) == {name: f"{name} must be given" for name in NAMES}
