"""Servers report their load over every transport, and clients of several kinds heed it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from tests.integration.problems import random_inputs
from tests.servers import ONE_WORKER, TIMEOUT_S, TRANSPORTS, Transport, wait_until

import bngrad
from bngrad._requests import ops
from bngrad._requests.attributes import TensorFlowAttributes
from bngrad_cli.embedded import EmbeddedServer
from bngrad_kernels.spec import FLOAT32, Spec
from bngrad_protos.v1 import batch_norm_grad_pb2 as pb
from bngrad_wire.load_report import TEXT_HEADER

SMALL, LARGE = Spec(FLOAT32, (2, 5, 5, 3), 3), Spec(FLOAT32, (16, 28, 28, 32), 3)


@pytest.fixture(scope="module")
def targets() -> Iterator[list[str]]:
    with EmbeddedServer(options=ONE_WORKER) as first, EmbeddedServer(options=ONE_WORKER) as second:
        yield [first.target, second.target]


@pytest.mark.parametrize("spec", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_client_learns_the_load_by_every_transport(targets: list[str], transport: Transport, spec: Spec) -> None:
    inputs = random_inputs(spec, 1)
    with bngrad.Client(targets, transport=transport) as client:
        servers = client._calls._load_balancer._servers

        def are_known() -> bool:
            client.fused_batch_norm_grad_v2(*inputs)
            return all(server.capacity for server in servers.values())

        wait_until(are_known)


def test_grpcs_own_weighted_round_robin_reaches_every_server(targets: list[str]) -> None:
    """As the page on fleets shows it, by grpcio alone."""
    config = {"loadBalancingConfig": [{"weighted_round_robin": {"blackoutPeriod": "1s"}}]}
    options = [("grpc.service_config", json.dumps(config))]
    request = ops.V2.prepare(random_inputs(SMALL, 1), TensorFlowAttributes(1e-4, "NHWC", True, "variance", 0), None)
    with ExitStack() as stack:
        clients = [stack.enter_context(bngrad.Client(target)) for target in targets]
        channel = stack.enter_context(grpc.insecure_channel(f"ipv4:{','.join(targets)}", options))
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ops.V2.method)

        def batches() -> list[int]:
            return [sum(client.server_info().batch_sizes) for client in clients]

        before = batches()

        def have_both_computed() -> bool:
            response = pb.FusedBatchNormGradV2Response.FromString(call(b"".join(request.pieces()), timeout=TIMEOUT_S))
            assert list(response.x_backprop.shape) == list(SMALL.shape)
            return all(after > count for after, count in zip(batches(), before, strict=True))

        wait_until(have_both_computed)


@pytest.mark.parametrize("number", [0, 1])
def test_each_of_two_stock_clients_of_a_unix_socket_gets_reports(tmp_path: Path, number: int) -> None:
    """grpcio does not tell their connections apart."""
    request = ops.V2.prepare(random_inputs(SMALL, 1), TensorFlowAttributes(1e-4, "NHWC", True, "variance", 0), None)
    with ExitStack() as stack:
        target = stack.enter_context(EmbeddedServer(f"unix:{tmp_path}/socket", options=ONE_WORKER)).target
        # With the global pool they would share a connection.
        channels = [
            stack.enter_context(grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]))
            for _ in range(2)
        ]

        calls: list[grpc.UnaryUnaryMultiCallable[bytes, bytes]] = [
            channel.unary_unary(ops.V2.method) for channel in channels
        ]

        def has_report() -> bool:
            answers = [each.with_call(b"".join(request.pieces()), timeout=TIMEOUT_S)[1] for each in calls]
            return TEXT_HEADER in dict(answers[number].trailing_metadata())

        wait_until(has_report)
